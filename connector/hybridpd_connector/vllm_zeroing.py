"""Zeroing of cache memory by the engine's thread, in order with the engine's own kernels.

A call into torch gives the interpreter away and may have to wait until other threads of the engine
have done with it, which took longer than all else around a post. So memory is zeroed by the C
library on a CPU and by the CUDA driver on a GPU, called without giving anything away: a memset
there is a launch, and returns at once. Whoever does it must first do it right on memory made for
the purpose; else, and on other devices, torch does it.
"""

import ctypes
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from hybridpd_connector.agent_api import MemoryRegion
from hybridpd_connector.errors import AgentError
from hybridpd_connector.tail_zeros import Tail
from hybridpd_connector.vllm_compat import UnsupportedEngineError

logger = logging.getLogger(__name__)

Fill = Callable[[Sequence[Tail]], None]
"""Zeroes all bytes of tails, at least one, which are known to be ours."""

_TRIAL_BYTES = 4096
_TRIAL = (
    Tail(8, 2, 2048, 3, 256, 64),
    Tail(1025, 2, 1024, 2, 129, 3),
    Tail(4000, 1, 0, 1, 0, 7),
    Tail(3328, 3, 100, 1, 0, 20),
)
_WORD_BYTES = 4
_MOST_PITCH_BYTES = 2**31 - 1


class Zeroing:
    """Zeroes tails in ``regions``, whose bytes are ``views``."""

    def __init__(
        self,
        regions: Sequence[MemoryRegion],
        views: Sequence[torch.Tensor],
        fill_of: "Callable[[Sequence[Allocation]], Fill] | None" = None,
    ) -> None:
        """``fill_of``: who zeroes; by default the fastest that passes its trial, which is now."""
        known = sorted(zip(regions, views, strict=True), key=lambda it: it[0].address)
        self._firsts = [region.address for region, _ in known]
        self._ends = [region.address + region.length_bytes for region, _ in known]
        allocations = [_allocation_of(region, view) for region, view in known]
        self._fill = (fill_of or chosen_fill)(allocations)

    def __call__(self, tails: Iterable[Tail]) -> None:
        """Zero all bytes of ``tails``; ``UnsupportedEngineError``, and nothing is zeroed, where one
        of them is not ours. ``AgentError`` when the device refuses."""
        inside: list[Tail] = []
        for tail in tails:
            if self._holds(tail.address, tail.end):
                inside.append(tail)
                continue
            for address, length in tail.ranges():
                if not self._holds(address, address + length):
                    raise outside(address)
                inside.append(Tail(address, 1, 0, 1, 0, length))
        if inside:
            self._fill(inside)

    def _holds(self, address: int, end: int) -> bool:
        """Are these bytes in one allocation?"""
        at = bisect_right(self._firsts, address) - 1
        return at >= 0 and end <= self._ends[at]


def outside(address: int) -> UnsupportedEngineError:
    """The refusal to zero what is not ours."""
    return UnsupportedEngineError("address to zero", "inside the cache", hex(address))


class Allocation(NamedTuple):
    """Memory from ``start`` on: its bytes, and the same as words of eight bytes, None where it is
    no whole number of them."""

    start: int
    bytes: torch.Tensor
    words: torch.Tensor | None


def _allocation_of(region: MemoryRegion, view: torch.Tensor) -> Allocation:
    return Allocation(region.address, view, None if len(view) % 8 else view.view(torch.int64))


def chosen_fill(allocations: Sequence[Allocation]) -> Fill:
    """The way without torch where it passes its trial on this device, else torch's."""
    device = allocations[0].bytes.device
    makers: dict[str, Callable[[torch.device], Fill]] = {"cpu": memory_fill, "cuda": driver_fill}
    maker = makers.get(device.type)
    if maker is not None:
        try:
            fill = maker(device)
            if passes_trial(fill, device):
                return fill
            failure = "other bytes were zeroed than were named"
        except (OSError, AttributeError, AgentError) as error:
            failure = str(error)
        logger.warning("cache memory is zeroed by torch, which takes longer: %s", failure)
    return torch_fill(allocations)


def passes_trial(fill: Fill, device: torch.device) -> bool:
    """Does ``fill`` zero what it is told, and nothing else?"""
    memory = torch.ones(_TRIAL_BYTES, dtype=torch.uint8, device=device)
    expected = memory.clone()
    for tail in _TRIAL:
        for start, length in tail.ranges():
            expected[start : start + length] = 0
    first = memory.data_ptr()
    fill([tail._replace(address=first + tail.address) for tail in _TRIAL])
    return bool(torch.equal(memory, expected))


def memory_fill(_device: torch.device) -> Fill:
    """The C library's ``memset``."""
    memset = ctypes.PyDLL(None).memset
    memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    memset.restype = ctypes.c_void_p

    def fill(tails: Sequence[Tail]) -> None:
        for tail in tails:
            for address, length in tail.ranges():
                memset(address, 0, length)

    return fill


def driver_fill(device: torch.device) -> Fill:
    """The CUDA driver's memset of rows, on the stream that the engine launches on."""
    driver = ctypes.PyDLL("libcuda.so.1")
    of_bytes, of_words = driver.cuMemsetD2D8Async, driver.cuMemsetD2D32Async
    for function, value in ((of_bytes, ctypes.c_ubyte), (of_words, ctypes.c_uint)):
        size = ctypes.c_size_t
        function.argtypes = ctypes.c_uint64, size, value, size, size, ctypes.c_void_p
        function.restype = ctypes.c_int
    return rows_fill(of_bytes, of_words, lambda: current_stream(device))


def rows_fill(
    of_bytes: Callable[..., int], of_words: Callable[..., int], stream_now: Callable[[], int]
) -> Fill:
    """Fill by memset of rows. Both functions take (address, pitch in bytes, value, width in their
    own unit, height, stream) and give 0 when all is well; ``of_words`` wants all of it on words."""

    def fill(tails: Sequence[Tail]) -> None:
        stream = stream_now()
        for tail in tails:
            for address, pitch, width, height in rows_of(tail):
                if (address | pitch | width) % _WORD_BYTES:
                    code = of_bytes(address, pitch, 0, width, height, stream)
                else:
                    code = of_words(address, pitch, 0, width // _WORD_BYTES, height, stream)
                if code:
                    raise AgentError("memset on the GPU", "CUDA_SUCCESS", f"CUDA error {code}")

    return fill


def current_stream(device: torch.device) -> int:
    """Handle of the stream that this thread launches on."""
    return int(torch.cuda.current_stream(device).cuda_stream)


Rows = tuple[int, int, int, int]
"""(address, pitch, width, height): ``height`` rows of ``width`` bytes, ``pitch`` bytes apart."""


def rows_of(tail: Tail) -> list[Rows]:
    """As few pitched areas as make up ``tail``: along its longer side, if the pitch allows."""
    address, length = tail.address, tail.length
    along_runs = (tail.runs, tail.run_step), (tail.layers, tail.layer_step)
    sides = along_runs if tail.runs >= tail.layers else along_runs[::-1]
    if sides[0][1] > _MOST_PITCH_BYTES:
        sides = sides[::-1]
    (height, pitch), (areas, step) = sides
    if pitch > _MOST_PITCH_BYTES:
        return [(piece, length, length, 1) for piece, _ in tail.ranges()]
    # A single row has no pitch; the driver wants one of at least a row.
    pitch = max(pitch, length)
    return [(address + area * step, pitch, length, height) for area in range(areas)]


def torch_fill(allocations: Sequence[Allocation]) -> Fill:
    """By torch, in one call for all tails."""
    firsts = [allocation.start for allocation in allocations]

    def grid_of(tail: Tail) -> torch.Tensor:
        """In words where all of it lies on them: a GPU zeroes those faster."""
        allocation = allocations[bisect_right(firsts, tail.address) - 1]
        start, word, view = tail.address - allocation.start, 1, allocation.bytes
        on_words = (start | tail.layer_step | tail.run_step | tail.length) % 8 == 0
        if allocation.words is not None and on_words:
            word, view = 8, allocation.words
        return view.as_strided(
            (tail.layers, tail.runs, tail.length // word),
            (tail.layer_step // word, tail.run_step // word, 1),
            start // word,
        )

    def fill(tails: Sequence[Tail]) -> None:
        torch._foreach_zero_([grid_of(tail) for tail in tails])

    return fill
