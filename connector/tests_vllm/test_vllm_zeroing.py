"""Whoever zeroes cache memory zeroes exactly what tails name, or is not taken."""

import ctypes
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector import vllm_zeroing
from hybridpd_connector.agent_api import MemoryRegion
from hybridpd_connector.errors import AgentError
from hybridpd_connector.tail_zeros import Tail
from hybridpd_connector.vllm_compat import UnsupportedEngineError
from hybridpd_connector.vllm_zeroing import (
    Zeroing,
    chosen_fill,
    memory_fill,
    passes_trial,
    rows_fill,
    rows_of,
    torch_fill,
)

CPU = torch.device("cpu")
STREAM = 7
ALLOCATION_BYTES = 8192


class Driver:
    """The CUDA driver's two functions over host memory, as strict as it is."""

    def __init__(self, code=0):
        self.code = code
        self.launches = 0

    def of_bytes(self, address, pitch, value, width, height, stream):
        return self.set_rows(1, address, pitch, value, width, height, stream)

    def of_words(self, address, pitch, value, width, height, stream):
        if address % 4 or pitch % 4:
            return 1
        return self.set_rows(4, address, pitch, value, width, height, stream)

    def set_rows(self, unit, address, pitch, value, width, height, stream):
        assert stream == STREAM
        self.launches += 1
        if self.code or pitch < width * unit or pitch >= 1 << 31 or not (width and height):
            return self.code or 1
        for row in range(height):
            ctypes.memset(address + row * pitch, value, width * unit)
        return 0

    def fill(self):
        return rows_fill(self.of_bytes, self.of_words, lambda: STREAM)


WAYS = {
    "torch": torch_fill,
    "C library": lambda allocations: memory_fill(CPU),
    "CUDA driver": lambda allocations: Driver().fill(),
}


def allocations(count=2):
    """(regions, views): memory of ones, in the order of addresses."""
    views = [torch.ones(ALLOCATION_BYTES, dtype=torch.uint8) for _ in range(count)]
    views.sort(key=torch.Tensor.data_ptr)
    return [MemoryRegion(view.data_ptr(), len(view)) for view in views], views


def zeroed(views):
    return torch.cat(views).eq(0).nonzero().flatten().tolist()


@st.composite
def tails(draw):
    """A tail inside ``ALLOCATION_BYTES``, its address the offset of its first byte."""
    unit = draw(st.sampled_from([1, 2, 4, 8]))
    length = unit * draw(st.integers(1, 32))
    runs, layers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    run_step = 0 if runs == 1 else length + unit * draw(st.integers(0, 16))
    inner = (runs - 1) * run_step + length
    layer_step = 0 if layers == 1 else inner + unit * draw(st.integers(0, 16))
    if draw(st.booleans()):
        # Layers between runs are as good.
        runs, layers, run_step, layer_step = layers, runs, layer_step, run_step
    size = Tail(0, layers, layer_step, runs, run_step, length).end
    room = ALLOCATION_BYTES - size
    return Tail(
        unit * draw(st.integers(0, room // unit)), layers, layer_step, runs, run_step, length
    )


@pytest.mark.parametrize("way", WAYS)
class TestEveryWay:
    @given(st.lists(tails(), min_size=1, max_size=4))
    def test_zeroes_what_it_is_told_and_nothing_else(self, way, wanted):
        regions, views = allocations()
        base = regions[0].address
        Zeroing(regions, views, WAYS[way])(
            [tail._replace(address=base + tail.address) for tail in wanted]
        )
        named = {
            at + byte for tail in wanted for at, length in tail.ranges() for byte in range(length)
        }
        assert zeroed(views) == sorted(named)

    def test_layers_in_allocations_of_their_own(self, way):
        regions, views = allocations()
        step = regions[1].address - regions[0].address
        Zeroing(regions, views, WAYS[way])([Tail(regions[0].address + 16, 2, step, 3, 40, 16)])
        piece = [16 + run * 40 + at for run in range(3) for at in range(16)]
        assert zeroed(views) == [
            layer * ALLOCATION_BYTES + at for layer in range(2) for at in piece
        ]

    def test_what_is_not_ours_is_refused_before_anything_is_zeroed(self, way):
        regions, views = allocations(1)
        base, end = regions[0].address, regions[0].address + ALLOCATION_BYTES
        zero = Zeroing(regions, views, WAYS[way])
        good = Tail(base, 1, 0, 1, 0, 8)
        for wrong in (
            Tail(base - 1, 1, 0, 1, 0, 2),
            Tail(end - 1, 1, 0, 1, 0, 2),
            Tail(end, 1, 0, 1, 0, 1),
            Tail(base, 2, ALLOCATION_BYTES - 4, 1, 0, 8),
        ):
            with pytest.raises(UnsupportedEngineError, match="inside the cache"):
                zero([good, wrong])
            assert not zeroed(views)

    def test_nothing_is_nothing(self, way):
        regions, views = allocations(1)
        Zeroing(regions, views, WAYS[way])([])
        assert not zeroed(views)

    def test_passes_the_trial(self, way):
        memory = torch.zeros(0, dtype=torch.uint8)
        if way == "torch":
            regions, views = allocations(1)
            zero = Zeroing(regions, views, torch_fill)
            zero([Tail(regions[0].address, 1, 0, 1, 0, ALLOCATION_BYTES)])
            assert len(zeroed(views)) == ALLOCATION_BYTES
            return
        assert passes_trial(WAYS[way](memory), CPU)


@given(tails(), st.sampled_from([0, 1 << 31, 1 << 33]), st.sampled_from([0, 1 << 31, 1 << 33]))
def test_rows_are_the_tail_with_pitches_that_the_driver_takes(tail, further, still):
    """Layers of a large cache may lie further apart than a pitch may be."""
    if tail.runs > 1:
        tail = tail._replace(run_step=tail.run_step + further)
    if tail.layers > 1:
        tail = tail._replace(layer_step=tail.layer_step + still)
    rows = rows_of(tail)
    assert all(width <= pitch < 1 << 31 for _, pitch, width, _ in rows)
    pieces = [
        (address + row * pitch, width)
        for address, pitch, width, height in rows
        for row in range(height)
    ]
    assert sorted(pieces) == sorted(tail.ranges())
    if not further and not still:
        assert len(rows) == min(tail.layers, tail.runs)


def test_a_driver_that_refuses_is_told():
    with pytest.raises(AgentError, match="CUDA error 700"):
        Driver(code=700).fill()([Tail(0, 1, 0, 1, 0, 8)])


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda tails: None, "other bytes were zeroed"),
        (lambda tails: memory_fill(CPU)([t._replace(length=t.length + 1) for t in tails]), "other"),
        (Driver(code=1).fill(), "CUDA error 1"),
        (None, "libnone.so: cannot open"),
    ],
)
def test_who_fails_the_trial_is_not_taken(broken, said, monkeypatch, caplog):
    def make(device):
        return broken or ctypes.PyDLL("libnone.so")

    monkeypatch.setattr(vllm_zeroing, "memory_fill", make)
    regions, views = allocations(1)
    with caplog.at_level(logging.WARNING):
        zero = Zeroing(regions, views)
    assert "zeroed by torch" in caplog.text
    assert said in caplog.text
    zero([Tail(regions[0].address + 5, 1, 0, 2, 10, 3)])
    assert zeroed(views) == [5, 6, 7, 15, 16, 17]


def test_the_way_on_a_cpu_is_its_own_and_never_gives_the_interpreter_away(caplog):
    fill = chosen_fill([vllm_zeroing.Allocation(0, torch.ones(8, dtype=torch.uint8), None)])
    assert fill.__qualname__.startswith("memory_fill")
    assert not caplog.records
