"""One call that UCX makes in vain, taken out of the UCX of this process.

When a reader's connection ends while answers to it wait for room in the socket, UCX throws the
answers away (``ucp_request_send_state_ff``). On the way it lets go of the memory registration of
each (``ucp_request_memory_dereg``), by fields of the answer that were never written: whatever was
in that memory before is taken for a list of registrations, and the process ends with SIGSEGV. An
answer has no registration. UCX's present protocols keep theirs elsewhere and do not make this call;
its former ones do, and NIXL does not work with those.

The call goes through a slot of the library's own table of external functions (ELF's .got.plt),
which the dynamic linker fills in at the first call. Here it is filled in first, with UCX's own
function that does nothing. No code is changed.
"""

import ctypes
import dataclasses
import os
import struct
from pathlib import Path

LIBRARY, CALL = "libucp", b"ucp_request_memory_dereg"
HELPERS, NOTHING = "libucs", "ucs_empty_function"
_MAPS = Path("/proc/self/maps")
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_LOAD, _DYNAMIC = 1, 2
_SEGMENT, _TAG = struct.Struct("<IIQQQQQQ"), struct.Struct("<QQ")
_RELOCATION = struct.Struct("<QQq")
_PLT_BYTES, _STRINGS, _SYMBOLS, _PLT = 2, 5, 6, 23
_SYMBOL_BYTES = 24


@dataclasses.dataclass(frozen=True, slots=True)
class Mapping:
    """A piece of a file in this process's memory; ``rights`` such as ``r-xp``."""

    start: int
    end: int
    rights: str
    offset: int
    path: str


def read_mappings(text: str) -> list[Mapping]:
    """Mapped files, of the text of /proc/PID/maps."""
    found = []
    for line in text.split("\n"):
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            found.append(Mapping(start, end, fields[1], int(fields[2], 16), fields[5]))
    return found


def slot_of(image: bytes, function: bytes) -> int | None:
    """Where a shared library keeps the address of an external function that it calls, from its
    load address on; None: it does not call it through its table. ``ValueError``: no such file."""
    if not image.startswith(_ELF64_LITTLE):
        raise ValueError("not a 64-bit little-endian ELF file")
    try:
        return _find_slot(image, function)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"a damaged ELF file: {error}") from error


def _find_slot(image: bytes, function: bytes) -> int | None:
    (table,) = struct.unpack_from("<Q", image, 32)
    (count,) = struct.unpack_from("<H", image, 56)
    segments = [_SEGMENT.unpack_from(image, table + n * _SEGMENT.size) for n in range(count)]

    def in_file(address: int) -> int:
        for kind, _, offset, start, _, length, _, _ in segments:
            if kind == _LOAD and start <= address < start + length:
                return int(address - start + offset)
        raise ValueError(f"address {address:#x} is in no segment")

    tags: dict[int, int] = {}
    for kind, _, offset, _, _, length, _, _ in segments:
        if kind == _DYNAMIC:
            for at in range(offset, offset + length, _TAG.size):
                tags.setdefault(*_TAG.unpack_from(image, at))
    if not {_PLT, _PLT_BYTES, _SYMBOLS, _STRINGS} <= tags.keys():
        return None
    first, symbols, strings = in_file(tags[_PLT]), in_file(tags[_SYMBOLS]), in_file(tags[_STRINGS])
    for at in range(first, first + tags[_PLT_BYTES], _RELOCATION.size):
        slot, info, _ = _RELOCATION.unpack_from(image, at)
        (name,) = struct.unpack_from("<I", image, symbols + (info >> 32) * _SYMBOL_BYTES)
        if image.startswith(function + b"\0", strings + name):
            return int(slot)
    return None


def leave_out_deregistration() -> list[str]:
    """Take the call out of every UCX loaded here; what of it could not be done, in words."""
    mappings = read_mappings(_MAPS.read_text(errors="surrogateescape"))
    loaded = sorted({m.path for m in mappings if _is(LIBRARY, m.path)})
    return [f"{path}: {why}" for path in loaded if (why := _leave_out(path, mappings))]


def _is(library: str, path: str) -> bool:
    """``libucp.so.0``, or ``libucp-b39b3ed9.so.0.0.0`` as wheels have it."""
    return Path(path).name.startswith((f"{library}.", f"{library}-"))


def _leave_out(path: str, mappings: list[Mapping]) -> str:
    try:
        slot = slot_of(Path(path).read_bytes(), CALL)
    except (OSError, ValueError) as error:
        return str(error)
    base = next((m.start for m in mappings if m.path == path and not m.offset), None)
    if slot is None or base is None:
        return f"no call of {CALL.decode()} to be found"
    place = base + slot
    if not any(m.start <= place < m.end and "w" in m.rights for m in mappings if m.path == path):
        return "its table of functions cannot be written"
    helpers = next((m.path for m in mappings if _is(HELPERS, m.path)), "")
    try:
        loaded = ctypes.CDLL(helpers, os.RTLD_NOW | os.RTLD_NOLOAD)
        nothing = ctypes.cast(getattr(loaded, NOTHING), ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        return str(error)
    held = ctypes.c_void_p.from_address(place)
    if not _is_ucx_code(held.value or 0, mappings):
        return "its table of functions is not where its file says"
    held.value = nothing
    return ""


def _is_ucx_code(place: int, mappings: list[Mapping]) -> bool:
    """What the linker has put there before or after a first call is, and so is what we put."""
    code = (m for m in mappings if "x" in m.rights and m.start <= place < m.end)
    return any(_is(library, m.path) for m in code for library in (LIBRARY, HELPERS))
