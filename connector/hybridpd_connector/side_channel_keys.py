"""The shared secrets of the side channel: read from a file, never from an argument or a variable.

File: text, one secret a line; empty lines and lines that begin with ``#`` are skipped. A secret is
``MIN_CHARACTERS`` or more printable characters without spaces, random ones: it is not a password
that is stretched. ``openssl rand -base64 32`` makes a good one. All secrets of a file are accepted;
the first is the one that this side offers. So keys change without a gap: append the new one
everywhere, then put it first everywhere, then remove the old one.

From each secret two X25519 private keys are derived, one for each role, with HKDF-SHA256 (RFC
5869, empty salt): both sides know both pairs from the file alone, and neither key is the secret.

Secrets and derived keys never appear in ``repr``, messages or errors. What may be shown is
``SharedKey.name``: eight hex digits, derived too, by which two logs can be compared.
"""

import dataclasses
import hashlib
import hmac
import logging
import os
import stat
import threading
from collections.abc import Iterator

from hybridpd_connector.errors import KeyFileError

logger = logging.getLogger(__name__)

FIELD = "side_channel_key_file"
MIN_CHARACTERS = 32
MAX_CHARACTERS = 1024
MAX_KEYS = 8
MAX_FILE_BYTES = 16 * 1024
_FEWEST_DISTINCT = 8
_PRIVATE_KEY_BYTES = 32
_NAME_BYTES = 4
_WAY_OUT = "make one with: openssl rand -base64 32"


@dataclasses.dataclass(frozen=True, repr=False)
class SharedKey:
    """What one secret gives: private X25519 keys (32 bytes) of both roles, and a name for logs."""

    server: bytes
    client: bytes
    name: str

    def __repr__(self) -> str:
        return f"SharedKey({self.name})"


def hkdf_sha256(secret: bytes, label: bytes, length_bytes: int, salt: bytes = b"") -> bytes:
    """RFC 5869 with SHA-256; ``label`` is its "info"."""
    key = hmac.digest(salt or bytes(hashlib.sha256().digest_size), secret, "sha256")
    output, block = b"", b""
    for counter in range(1, -(-length_bytes // hashlib.sha256().digest_size) + 1):
        block = hmac.digest(key, block + label + bytes((counter,)), "sha256")
        output += block
    return output[:length_bytes]


def derive(secret: bytes) -> SharedKey:
    """The keys of one secret."""
    return SharedKey(
        server=hkdf_sha256(secret, b"hybridpd side channel v1 server", _PRIVATE_KEY_BYTES),
        client=hkdf_sha256(secret, b"hybridpd side channel v1 client", _PRIVATE_KEY_BYTES),
        name=hkdf_sha256(secret, b"hybridpd side channel v1 name", _NAME_BYTES).hex(),
    )


def parse_keys(raw: bytes) -> tuple[SharedKey, ...]:
    """The keys of a file's content, in order. ``KeyFileError`` names the line, never its text."""
    if len(raw) > MAX_FILE_BYTES:
        raise KeyFileError(FIELD, f"at most {MAX_FILE_BYTES} bytes", "a larger file", _WAY_OUT)
    keys = tuple(dict.fromkeys(derive(secret) for secret in _secrets(raw)))
    if not keys:
        raise KeyFileError(FIELD, "a secret on a line of its own", "none", _WAY_OUT)
    if len(keys) > MAX_KEYS:
        raise KeyFileError(FIELD, f"at most {MAX_KEYS} secrets", len(keys), "remove old ones")
    return keys


def _secrets(raw: bytes) -> Iterator[bytes]:
    for number, line in enumerate(raw.split(b"\n"), start=1):
        secret = line.strip()
        if not secret or secret.startswith(b"#"):
            continue
        field = f"{FIELD}, line {number}"
        if not all(0x21 <= byte <= 0x7E for byte in secret):
            raise KeyFileError(
                field, "printable ASCII without spaces", "other characters", _WAY_OUT
            )
        if not MIN_CHARACTERS <= len(secret) <= MAX_CHARACTERS:
            bounds = f"{MIN_CHARACTERS} to {MAX_CHARACTERS} characters"
            raise KeyFileError(field, bounds, len(secret), _WAY_OUT)
        if len(set(secret)) < _FEWEST_DISTINCT:
            raise KeyFileError(
                field, f"{_FEWEST_DISTINCT} different characters or more", "fewer", _WAY_OUT
            )
        yield secret


class KeyFile:
    """A key file that may change while it is in use. Usable from several threads."""

    def __init__(self, path: object) -> None:
        """Read it once. ``KeyFileError`` when that fails: an engine must not start without."""
        # A key that was put here by mistake is no path, and is not printed.
        if not isinstance(path, str) or not os.path.isabs(path):
            raise KeyFileError(
                FIELD, "the absolute path of a file", "something else", "a path, not a key"
            )
        self._path = path
        self._lock = threading.Lock()
        self._keys = parse_keys(self._content())
        self._problem = ""

    def __repr__(self) -> str:
        return f"KeyFile({', '.join(key.name for key in self._keys)})"

    def current(self) -> tuple[SharedKey, ...]:
        """The keys as the file has them now; the last good ones while it cannot be used."""
        with self._lock:
            try:
                keys = parse_keys(self._content())
            except KeyFileError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    logger.warning("going on with the keys read before: %s", error)
                return self._keys
            self._problem = ""
            if keys != self._keys:
                self._keys = keys
                logger.info("side channel keys changed: %s", self)
            return keys

    def exposure(self) -> str:
        """Who else can read or change the file; empty when nobody can."""
        try:
            mode = os.stat(self._path).st_mode
        except OSError:
            return ""
        if mode & stat.S_IRWXO:
            return f"everyone on this host may use it (mode {stat.S_IMODE(mode):04o})"
        if mode & stat.S_IWGRP:
            return f"its group may change it (mode {stat.S_IMODE(mode):04o})"
        return ""

    def _content(self) -> bytes:
        try:
            # Looked at first: to open a pipe would wait for its writer.
            if not stat.S_ISREG(os.stat(self._path).st_mode):
                raise KeyFileError(FIELD, "a regular file", "something else", "mount it as a file")
            with open(self._path, "rb") as file:
                return file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a path"
            raise KeyFileError(
                FIELD,
                "a file that this process can read",
                reason,
                "check that the path is mounted here, and its owner and mode",
            ) from None


def tell_about_keys(keys: KeyFile | None) -> None:
    """One line at start, in one process of each engine: how well the side channel is guarded."""
    if keys is None:
        logger.warning(
            "the side channel has no key: whoever reaches its port can read the KV cache; "
            "set %s in kv_connector_extra_config on both roles",
            FIELD,
        )
        return
    logger.info("the side channel is encrypted and asks for a key: %s", keys)
    exposure = keys.exposure()
    if exposure:
        logger.warning("%s: %s; keep it to the user of the engine", FIELD, exposure)
