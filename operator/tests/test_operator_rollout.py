"""The rollout as a table of whole traces, and the laws that hold in every trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_operator import names
from hybridpd_operator.observed import Child, Pod, Ref
from hybridpd_operator.rollout import (
    STRATEGIES,
    Phase,
    Presence,
    decide,
    presence,
)

OLD, NEW, THIRD = "aaaaaaaa", "bbbbbbbb", "cccccccc"


def there(revision: str, *, router: bool = False, engines: bool = False) -> Presence:
    return Presence(revision, router=router, engines=engines)


#: One trace per row: what is left before each pass, and what the pass does.
TRACES = {
    "nothing runs yet": [
        ([], Phase.STARTED, True, NEW, ()),
        ([there(NEW, router=True, engines=True)], Phase.STARTED, True, NEW, ()),
    ],
    "old pair and router": [
        (
            [there(OLD, router=True, engines=True)],
            Phase.STOPPING_ROUTER,
            False,
            OLD,
            ((OLD, ("router",)),),
        ),
        ([there(OLD, router=True, engines=True)], Phase.STOPPING_ROUTER, False, OLD, None),
        (
            [there(OLD, engines=True)],
            Phase.STOPPING_ENGINES,
            False,
            NEW,
            ((OLD, ("prefill", "decode")),),
        ),
        ([there(OLD, engines=True)], Phase.STOPPING_ENGINES, False, NEW, None),
        ([], Phase.STARTED, True, NEW, ()),
    ],
    "old pair without a router": [
        ([there(OLD, engines=True)], Phase.STOPPING_ENGINES, False, NEW, None),
        ([], Phase.STARTED, True, NEW, ()),
    ],
    "edited again while the first edit starts": [
        (
            [there(OLD, engines=True), there(THIRD, router=True, engines=True)],
            Phase.STOPPING_ROUTER,
            False,
            THIRD,
            ((THIRD, ("router",)),),
        ),
        (
            [there(OLD, engines=True), there(THIRD, engines=True)],
            Phase.STOPPING_ENGINES,
            False,
            NEW,
            ((OLD, ("prefill", "decode")), (THIRD, ("prefill", "decode"))),
        ),
        ([], Phase.STARTED, True, NEW, ()),
    ],
    "edit taken back after the router went": [
        ([there(NEW, engines=True)], Phase.STARTED, True, NEW, ()),
    ],
    "parts of both": [
        (
            [there(OLD, router=True), there(NEW, engines=True)],
            Phase.STOPPING_ROUTER,
            False,
            OLD,
            ((OLD, ("router",)),),
        ),
    ],
}


@pytest.mark.parametrize("name", TRACES)
def test_recreate_follows_its_trace(name: str) -> None:
    for present, phase, start, serving, removals in TRACES[name]:
        decision = decide("Recreate", NEW, present, may_start=True)
        assert (decision.phase, decision.start, decision.serving) == (phase, start, serving)
        if removals is not None:
            assert tuple((one.revision, one.roles) for one in decision.removals) == removals
        assert decision.start or decision.message


@pytest.mark.parametrize(
    ("present", "serving"),
    [
        ([], NEW),
        ([there(OLD, router=True, engines=True)], OLD),
        ([there(NEW, router=True, engines=True)], NEW),
        ([there(OLD, engines=True)], NEW),
    ],
)
def test_a_blocked_service_keeps_what_it_has(present: list[Presence], serving: str) -> None:
    decision = decide("Recreate", NEW, present, may_start=False)
    assert decision.phase is Phase.BLOCKED
    assert (decision.start, decision.serving, decision.removals) == (False, serving, ())


PRESENT = st.lists(
    st.builds(
        Presence, st.sampled_from([OLD, NEW, THIRD]), router=st.booleans(), engines=st.booleans()
    ),
    max_size=3,
    unique_by=lambda one: one.revision,
)


@given(PRESENT, st.booleans(), st.sampled_from(sorted(STRATEGIES)))
def test_no_start_beside_another_revision_and_no_removal_of_the_desired(
    present: list[Presence], may_start: bool, strategy: str
) -> None:
    decision = decide(strategy, NEW, present, may_start=may_start)
    others = [one for one in present if one.revision != NEW and (one.router or one.engines)]
    assert not (decision.start and others)
    assert not (decision.start and not may_start)
    assert NEW not in {removal.revision for removal in decision.removals}


@given(PRESENT)
def test_every_trace_ends_with_the_desired_revision(present: list[Presence]) -> None:
    """Carrying out what is decided reaches the start, and the router always goes first."""
    left = {one.revision: {"router": one.router, "engines": one.engines} for one in present}
    for _ in range(4):
        now = [there(revision, **parts) for revision, parts in left.items()]
        decision = decide("Recreate", NEW, now, may_start=True)
        if decision.start:
            return
        for removal in decision.removals:
            part = "router" if removal.roles == (names.ROUTER,) else "engines"
            assert part == "router" or not left[removal.revision]["router"]
            left[removal.revision][part] = False
    raise AssertionError("the new revision never started")


def test_presence_counts_objects_and_pods_also_terminating_ones() -> None:
    def child(role: str, revision: str) -> Child:
        labels = {names.LABEL_ROLE: role, names.LABEL_REVISION: revision}
        return Child(Ref("StatefulSet", role), "u", {"metadata": {"labels": labels}})

    shared = Child(Ref("Service", "demo"), "u", {"metadata": {"labels": {}}})
    pod = Pod("p", names.ROUTER, OLD, ready=False, deleting=True)
    assert presence([child("prefill", NEW), shared], [pod]) == (
        there(OLD, router=True),
        there(NEW, engines=True),
    )
