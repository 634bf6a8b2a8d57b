"""A pytest plugin: a test whose engines got no processor is run once more, and says so.

Two cores carry up to ten engine processes. Rarely one of them is not scheduled for a minute, and a
request runs into a timeout of ours or of its client. That says nothing about the connector. What
says something is never repeated: a wrong token, a wrong count, bytes that differ, an engine that
died. More than `MOST_REPEATS` in one session are failures too: then it is no accident.
"""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol

from hybridpd_testkit.processes import HttpError

STARVED = (TimeoutError, HttpError)
MOST_REPEATS = 3
_starved = pytest.StashKey[bool]()
_repeated = pytest.StashKey[list[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Remember whether a failure looks like starvation."""
    if call.excinfo is not None:
        item.stash[_starved] = call.excinfo.errisinstance(STARVED)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and a starved one once more."""
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    repeated = item.session.stash.setdefault(_repeated, [])
    failed = any(report.failed for report in reports)
    if failed and item.stash.get(_starved, False) and len(repeated) < MOST_REPEATS:
        repeated.append(item.nodeid)
        item.stash[_starved] = False
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was repeated."""
    session = terminalreporter._session
    repeated = session.stash.get(_repeated, []) if session is not None else []
    for nodeid in repeated:
        terminalreporter.write_line(f"starved and run once more: {nodeid}")
