"""Where a library keeps the address of a function that it calls, read from its file."""

import ctypes
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpd_connector import agent_ucx
from hybridpd_connector.agent_ucx import (
    CALL,
    Mapping,
    leave_out_deregistration,
    read_mappings,
    slot_of,
)

SLOT = 0x4018
LOADED_AT = 0x1000  # the one segment's address; its bytes begin at 0 in the file
_HEADERS = 64 + 2 * 56
STUB = 0x5000
NOTHING_AT = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value


def library(names=(b"other", CALL), *, slots=(0x4010, SLOT), tags=(2, 5, 6, 23)):
    """A shared library of a header, two program headers, and what they point to."""
    strings = b"\0" + b"".join(name + b"\0" for name in names)
    at = [strings.index(b"\0" + name + b"\0") + 1 for name in names]
    symbols = bytes(24) + b"".join(struct.pack("<I", offset) + bytes(20) for offset in at)
    plt = b"".join(
        struct.pack("<QQq", slot, (number << 32) | 7, 0)
        for number, slot in enumerate(slots, start=1)
    )
    starts, place = {}, _HEADERS
    for tag, part in ((5, strings), (6, symbols), (23, plt)):
        starts[tag] = LOADED_AT + place
        place += len(part)
    starts[2] = len(plt)
    dynamic = b"".join(struct.pack("<QQ", tag, starts[tag]) for tag in tags) + bytes(16)
    size = place + len(dynamic)
    segments = struct.pack("<IIQQQQQQ", 1, 4, 0, LOADED_AT, 0, size, size, 0)
    segments += struct.pack(
        "<IIQQQQQQ", 2, 4, place, LOADED_AT + place, 0, len(dynamic), len(dynamic), 0
    )
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<H", header, 56, 2)
    return bytes(header) + segments + strings + symbols + plt + dynamic


def test_the_slot_of_a_function_is_found():
    assert slot_of(library(), CALL) == SLOT
    assert slot_of(library(), b"other") == 0x4010


@pytest.mark.parametrize("name", [CALL[:-1], CALL + b"_more", b""])
def test_no_other_function_will_do(name):
    assert slot_of(library(), name) is None


def test_a_library_without_such_a_table_has_no_slot():
    assert slot_of(library(tags=(2, 5, 6)), CALL) is None


@pytest.mark.parametrize("image", [b"", b"\x7fELF\x01\x01", b"\x7fELF\x02\x02", b"text"])
def test_other_files_are_refused(image):
    with pytest.raises(ValueError, match="ELF"):
        slot_of(image, CALL)


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_a_damaged_file_ends_in_a_named_error_or_an_answer(data):
    image = bytearray(library())
    for _ in range(data.draw(st.integers(0, 4))):
        image[data.draw(st.integers(6, len(image) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(image[: data.draw(st.integers(6, len(image)))])
    try:
        found = slot_of(cut, CALL)
    except ValueError:
        return
    assert found is None or isinstance(found, int)


def test_an_address_beyond_all_memory_is_a_damaged_file():
    image = bytearray(library())
    struct.pack_into("<Q", image, 32, 1 << 63)
    with pytest.raises(ValueError, match="damaged"):
        slot_of(bytes(image), CALL)


def test_mappings_are_read():
    text = (
        "00400000-00452000 r-xp 00001000 08:02 173521      /opt/a b/libucp.so (deleted)\n"
        "00651000-00652000 rw-p 00051000 08:02 173521      /opt/libucp.so\n"
        "7ffd-7fff rw-p 00000000 00:00 0                   [stack]\n"
        "7fffa000-7fffb000 rw-p 00000000 00:00 0 \n"
    )
    assert read_mappings(text) == [
        Mapping(0x400000, 0x452000, "r-xp", 0x1000, "/opt/a b/libucp.so (deleted)"),
        Mapping(0x651000, 0x652000, "rw-p", 0x51000, "/opt/libucp.so"),
    ]


def test_names_of_other_files_are_anything():
    for name in ("/opt/a\x1cb\x85\u2028c", "/opt/\udcff", "/opt/x\r"):
        text = f"00400000-00452000 r-xp 00001000 08:02 173521      {name}\n"
        assert [mapping.path for mapping in read_mappings(text)] == [name]


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """A UCX in this process: its file on disk, its table in memory of ours, its helpers' function
    in a library that is loaded anyway. Its code has no memory: nothing calls it."""
    table = ctypes.create_string_buffer(0x8000)
    ctypes.c_void_p.from_buffer(table, SLOT).value = STUB
    base, path = ctypes.addressof(table), tmp_path / "libucp-1.so.0"
    path.write_bytes(library())
    libc = next(m.path for m in read_mappings(agent_ucx._MAPS.read_text()) if "/libc.so" in m.path)
    maps = tmp_path / "maps"
    monkeypatch.setattr(agent_ucx, "_MAPS", maps)
    monkeypatch.setattr(agent_ucx, "HELPERS", "libc")
    monkeypatch.setattr(agent_ucx, "NOTHING", "abs")

    def write_maps(rights="rw-p", path=path, table_of=None):
        maps.write_text(
            f"{base:x}-{base + 0x1000:x} r--p 00000000 00:00 1 {path}\n"
            f"{base + 0x1000:x}-{base + 0x8000:x} {rights} 00001000 00:00 1 {table_of or path}\n"
            f"{STUB:x}-{STUB + 0x1000:x} r-xp 00008000 00:00 1 {path}\n"
            f"1000-2000 r--p 00000000 00:00 1 {libc}\n"
            f"{NOTHING_AT:x}-{NOTHING_AT + 1:x} r-xp 00008000 00:00 1 {libc}\n"
        )

    write_maps()
    return table, write_maps


def left_alone(table):
    """Why nothing was written."""
    before = table.raw
    (why,) = leave_out_deregistration()
    assert table.raw == before
    return why


def test_the_call_is_led_to_a_function_that_does_nothing(loaded):
    table, _ = loaded
    for _ in range(2):  # as often as agents are made
        assert leave_out_deregistration() == []
        assert ctypes.c_void_p.from_buffer(table, SLOT).value == NOTHING_AT
        assert not any(table.raw[:SLOT] + table.raw[SLOT + 8 :])


@pytest.mark.parametrize(
    "other",
    [0, 1, STUB - 1, STUB + 0x1000, NOTHING_AT + 1],
    ids=[
        "nothing",
        "one",
        "before",
        "behind",
        "beside the function",
    ],  # addresses differ by process
)
def test_a_slot_that_holds_no_code_of_ucx_is_left_alone(loaded, other):
    """Its file says otherwise than what is in memory: another file of the same name, say."""
    table, _ = loaded
    ctypes.c_void_p.from_buffer(table, SLOT).value = other
    assert left_alone(table).endswith("its table of functions is not where its file says")


def test_memory_of_others_is_left_alone(loaded, tmp_path):
    """The place is in memory that can be written, and that is not of this library."""
    table, write_maps = loaded
    write_maps(table_of=tmp_path / "libother.so")
    assert left_alone(table).endswith("its table of functions cannot be written")


def test_a_table_that_cannot_be_written_is_left_alone(loaded):
    table, write_maps = loaded
    write_maps("r--p")
    assert left_alone(table).endswith("its table of functions cannot be written")


def test_helpers_without_the_function_are_named(loaded, monkeypatch):
    table, _ = loaded
    monkeypatch.setattr(agent_ucx, "NOTHING", "no_such_function")
    assert "no_such_function" in left_alone(table)


def test_another_ucx_is_named(loaded, tmp_path):
    table, write_maps = loaded
    path = tmp_path / "libucp.so"
    path.write_bytes(library(names=(b"other", b"another")))
    write_maps(path=path)
    assert left_alone(table) == f"{path}: no call of {CALL.decode()} to be found"


def test_without_a_ucx_there_is_nothing_to_do(loaded, tmp_path):
    _, write_maps = loaded
    write_maps(path=tmp_path / "libucp_tools.so")
    assert leave_out_deregistration() == []
