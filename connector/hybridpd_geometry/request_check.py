"""Do a request's blocks exist on a pair of ranks, and do they cover its tokens?

Asked for every load, on an engine's thread that comes from other work: the answer is one look in
one function, and what is wrong is searched only when the answer is no. A function more costs what
its code takes to come from memory (`docs/adr/0018-a-load-on-a-cold-core.md`).
"""

from typing import NamedTuple

from hybridpd_geometry.layers import STATE
from hybridpd_geometry.read_plan import PairPlan, ReadRequest
from hybridpd_geometry.side_table import SideTable


class _GroupPair(NamedTuple):
    """Groups of ours and theirs that share layers; ``only_last``: of their blocks."""

    local_group: int
    remote_group: int
    only_last: bool


class RequestCheck:
    """See the module. ``local`` and ``remote`` know which blocks exist."""

    def __init__(self, plan: PairPlan, local: SideTable, remote: SideTable) -> None:
        self._plan = plan
        self._local, self._remote = local, remote
        self._groups = len(plan.destination.group_kinds), len(plan.source.group_kinds)
        self._block_tokens = plan.destination.block_tokens, plan.source.block_tokens
        self._blocks = local.placement.num_blocks, remote.placement.num_blocks
        # Every group has layers, and every layer is paired: all groups of both sides.
        self._pairs = tuple(
            dict.fromkeys(
                _GroupPair(
                    pair.destination.group, pair.source.group, pair.destination.kind == STATE
                )
                for pair in plan.layers
            )
        )

    def check(self, request: ReadRequest) -> None:
        """GeometryError when the request's blocks do not exist or do not cover its tokens."""
        if not self._is_plain(request):
            self._check_each(request)

    def _is_plain(self, request: ReadRequest) -> bool:
        """True: nothing is wrong with it. False: look closer; a later first token is one reason."""
        ours, theirs, tokens = request.destination.groups, request.source.groups, request.tokens
        if request.first_token or tokens < 0 or (len(ours), len(theirs)) != self._groups:
            return False
        (our_tokens, their_tokens), (our_blocks, their_blocks) = self._block_tokens, self._blocks
        for local_group, remote_group, only_last in self._pairs:
            here, there = ours[local_group], theirs[remote_group]
            if only_last:
                here, there = here[-1:], there[-1:]
                if not (here and there):
                    return False
            elif len(here) * our_tokens < tokens or len(there) * their_tokens < tokens:
                return False
            if here and not 0 <= min(here) <= max(here) < our_blocks:
                return False
            if there and not 0 <= min(there) <= max(there) < their_blocks:
                return False
        return True

    def _check_each(self, request: ReadRequest) -> None:
        """What `check` says, in as many looks as there are things to be wrong."""
        self._plan.check_request(request)
        local_ids: list[int] = []
        remote_ids: list[int] = []
        for local_group, remote_group, only_last in self._pairs:
            local = request.destination.groups[local_group]
            remote = request.source.groups[remote_group]
            local_ids += local[-1:] if only_last else local
            remote_ids += remote[-1:] if only_last else remote
        self._local.check_blocks(local_ids)
        self._remote.check_blocks(remote_ids)
