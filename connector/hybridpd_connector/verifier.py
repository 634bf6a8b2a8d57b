"""D's side of checksums: what a load brought is compared before the load is reported.

    begin --own sums and every source's slot are here--> ok | different
      |-- P states no sums, or they cannot be had in ``CHECK_SECONDS`` --> unchecked

``different`` fails a load. A statement that is missing proves nothing about the bytes, which the
lease board has already vouched for; it is counted and warned of instead, once per cause. Where sums
are required (mode "all") they are waited for longer, ``PROOF_SECONDS``, and ``unchecked`` fails.
"""

import dataclasses
import logging
from collections.abc import Sequence

from hybridpd_connector import stats
from hybridpd_connector.agent_api import ReadState
from hybridpd_connector.errors import AgentError, StateError, SumError
from hybridpd_connector.peer_link import LinkSums, PeerLink
from hybridpd_connector.sum_board import (
    MARK,
    PendingSums,
    SlotHeader,
    SlotRead,
    Summer,
    SumReader,
    SumView,
    mode_of,
    seal_of,
)
from hybridpd_geometry import RankPlacement, ReadRequest, SumRequest

logger = logging.getLogger(__name__)

CHECKSUM_MISMATCH = "checksum_mismatch"
CHECKSUM_MISSING = "checksum_missing"

CHECK_SECONDS = 2.0
"""How long a load may wait for P's sums: P states them in the step after the prefill."""

PROOF_SECONDS = 10.0
"""How long where sums are required: a step of a busy P may take seconds."""

MAX_WARNINGS = 32
"""Different causes that are told; a cause may hold a number that a peer chose."""

HOPE_SECONDS = 0.001
"""Sums on an idle device and the read of a slot take less; a step waits for them no longer."""

NOT_COMPARABLE = "the TP sizes of the two engines cut sections at different places"
NOT_IN_TIME = "no sums within {:.0f} s"
NOT_READ = "the slot of the prefill rank could not be read"
OVERWRITTEN = "the slot holds the sums of a later prefill"
OTHER_VERSION = "the prefill engine sums in another way"
OTHER_LENGTH = "the prefill engine states another number of sums"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The end of a check. ``reason``: why the load must not be used, empty when it may; ``detail``:
    what differs or is missing, for people."""

    request_id: str
    reason: str = ""
    detail: str = ""


@dataclasses.dataclass
class _Slot:
    """One source rank's sums: being read, or here."""

    source: int
    view: SumView
    read: SlotRead | None = None
    tried: bool = False  # in this step
    header: SlotHeader | None = None
    words: Sequence[int] = ()


@dataclasses.dataclass
class _Check:
    request_id: str
    sums: LinkSums
    request: SumRequest
    sequence: int
    pending: PendingSums
    begun: float
    slots: list[_Slot]
    words: Sequence[int] | None = None


class _UncheckedError(Exception):
    """The check cannot come to a result; the argument is one of the causes above."""


class Verifier:
    """All checks of one D rank. Not thread-safe: the consumer's lock guards it."""

    def __init__(
        self,
        reader: SumReader,
        summer: Summer,
        placement: RankPlacement,
        every: int,
        recorder: stats.Stats,
    ) -> None:
        self._reader = reader
        self._summer = summer
        self._placement = placement
        self._every = every
        self._stats = recorder
        self._wait_seconds = PROOF_SECONDS if reader.required else CHECK_SECONDS
        self._checks: list[_Check] = []
        self._refused: list[Verdict] = []
        self._orphans: list[SlotRead] = []
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"Verifier(checks={len(self._checks)}, orphans={len(self._orphans)})"

    @property
    def in_flight(self) -> int:
        """Checks without a result."""
        return len(self._checks) + len(self._refused)

    def uses(self, link: PeerLink) -> bool:
        """Is a slot of this link still being read?"""
        views = link.sums.views.values() if link.sums else ()
        return any(read.view is view for read in self._orphans for view in views)

    def looks_at(self, sequence: int) -> bool:
        """Is this one of the loads that are compared?"""
        return sequence % self._every == 0

    def begin(
        self, request_id: str, link: PeerLink, read: ReadRequest, sequence: int, now: float
    ) -> bool:
        """All bytes of a load are here. True: ``poll`` gives its verdict; False: report it now."""
        if not self.looks_at(sequence):
            return False
        try:
            check = self._build(request_id, link.sums, read, sequence, now)
        except _UncheckedError as cause:
            verdict = self._unchecked(request_id, str(cause))
            if not verdict.reason:
                return False
            self._refused.append(verdict)
            return True
        self._checks.append(check)
        return True

    def _build(
        self,
        request_id: str,
        sums: LinkSums | None,
        read: ReadRequest,
        sequence: int,
        now: float,
    ) -> _Check:
        if sums is None:
            raise _UncheckedError(NOT_COMPARABLE)
        if not sums.every or sequence % sums.every:
            there, here = mode_of(sums.every), mode_of(self._every)
            raise _UncheckedError(f"checksum is {here} here and {there} on the prefill engine")
        request = sums.pair.request(read.tokens, read.destination, read.first_token)
        try:
            pending = self._summer.start(request)
        except SumError as error:
            raise _UncheckedError(f"this rank could not sum its pages: {error}") from error
        slots = [_Slot(source, view) for source, view in sums.views.items()]
        return _Check(request_id, sums, request, sequence, pending, now, slots)

    def hopeful(self, now: float) -> bool:
        """Has a check begun just now, so that another look in this very step may see its end?"""
        return any(now - check.begun <= HOPE_SECONDS for check in self._checks)

    def end_step(self) -> None:
        """From now on slots may be read anew that P had not written."""
        for check in self._checks:
            for slot in check.slots:
                slot.tried = slot.read is not None

    def poll(self, now: float) -> list[Verdict]:
        """One look at every check; the verdicts of those that ended."""
        self._orphans = [read for read in self._orphans if not self._drained(read)]
        ended, self._refused = self._refused, []
        for check in list(self._checks):
            verdict: Verdict | None
            try:
                verdict = self._look(check, now)
            except _UncheckedError as cause:
                verdict = self._unchecked(check.request_id, str(cause))
            if verdict is not None:
                self._checks.remove(check)
                self._orphans.extend(slot.read for slot in check.slots if slot.read is not None)
                ended.append(verdict)
        return ended

    def _drained(self, read: SlotRead) -> bool:
        return self._reader.poll(read) is not ReadState.PENDING and self._reader.finish(read)

    def _look(self, check: _Check, now: float) -> Verdict | None:
        if check.words is None:
            check.words = check.pending.words()
        for slot in check.slots:
            if slot.header is None and (slot.read is not None or not slot.tried):
                self._advance(check, slot)
        if check.words is not None and all(slot.header for slot in check.slots):
            verdict = self._compare(check, check.words)
            if verdict is not None:
                return verdict
        if now - check.begun >= self._wait_seconds:
            raise _UncheckedError(NOT_IN_TIME.format(self._wait_seconds))
        return None

    def _advance(self, check: _Check, slot: _Slot) -> None:
        """Read the slot, again when P has not written it yet."""
        try:
            if slot.read is None:
                words = check.sums.pair.source_words(check.request)
                slot.read = self._reader.start(slot.view, check.sequence, words)
                slot.tried = True
            if slot.read is None:
                return
            state = self._reader.poll(slot.read)
        except AgentError as error:
            raise _UncheckedError(NOT_READ) from error
        if state is ReadState.PENDING:
            return
        read, slot.read = slot.read, None
        header, theirs = self._reader.take(read)
        if not self._reader.finish(read):
            raise StateError("checksum slot", "to release an ended read", "still in flight")
        if state is ReadState.FAILED:
            raise _UncheckedError(NOT_READ)
        if self._is_written(header, check, len(theirs)):
            slot.header, slot.words = header, theirs

    @staticmethod
    def _is_written(header: SlotHeader, check: _Check, words: int) -> bool:
        """Does the slot hold what was asked for? Nothing in it is trusted to be well-formed."""
        if header.sequence > check.sequence:
            raise _UncheckedError(OVERWRITTEN)
        if header.sequence < check.sequence:
            return False
        if header.mark != MARK:
            raise _UncheckedError(OTHER_VERSION)
        if header.words != words:
            raise _UncheckedError(OTHER_LENGTH)
        return True

    def _compare(self, check: _Check, ours: Sequence[int]) -> Verdict | None:
        """The verdict; None when a slot was being written while it was read."""
        for slot in check.slots:
            wrong = [
                (span.source_word + step, span.destination_word + step)
                for span in check.sums.pair.spans(slot.source, check.request)
                if not _equal(slot.words, span.source_word, ours, span.destination_word, span.words)
                for step in range(span.words)
                if slot.words[span.source_word + step] != ours[span.destination_word + step]
            ]
            if not wrong:
                continue
            if slot.header is None or slot.header.seal != seal_of(check.sequence, slot.words):
                slot.header = None
                return None
            self._stats.checksum(stats.DIFFERENT)
            theirs, here = wrong[0]
            detail = self._describe(check, here, slot.words[theirs], ours[here])
            detail += f"; {len(wrong)} sums of rank {slot.source} differ"
            return Verdict(check.request_id, CHECKSUM_MISMATCH, detail)
        self._stats.checksum(stats.OK)
        return Verdict(check.request_id)

    def _describe(self, check: _Check, word: int, expected: int, got: int) -> str:
        request = check.request
        sums = check.sums.pair.destination
        place = sums.place_of(word, request, self._placement.rank)
        layer = sums.layout.by_name[place.layer]
        ids = request.blocks.groups[layer.group]
        block, where = ids[-1], f"section {place.section} units"
        where += f" {place.units.start}-{place.units.stop - 1}"
        if place.tokens:
            block = ids[place.tokens.start // sums.layout.block_tokens]
            where += f" tokens {place.tokens.start}-{place.tokens.stop - 1}"
        region = self._placement.layer_region[place.layer]
        return (
            f"region {region} ({place.layer}), block {block}, {where}: "
            f"expected {expected:016x}, got {got:016x}"
        )

    def _unchecked(self, request_id: str, cause: str) -> Verdict:
        self._stats.checksum(stats.UNCHECKED)
        if self._reader.required:
            return Verdict(request_id, CHECKSUM_MISSING, cause)
        if cause not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(cause)
            logger.warning("loads are not checked by checksums (told once): %s", cause)
        return Verdict(request_id)


def _equal(theirs: Sequence[int], at: int, ours: Sequence[int], here: int, words: int) -> bool:
    return theirs[at : at + words] == ours[here : here + words]
