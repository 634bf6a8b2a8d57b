"""The key file of the side channel: what is taken, what is refused, and what is shown of it."""

import logging
import os
import stat

import pytest

from hybridpd_connector import side_channel_keys
from hybridpd_connector.errors import KeyFileError
from hybridpd_connector.side_channel_keys import (
    MAX_FILE_BYTES,
    MAX_KEYS,
    KeyFile,
    derive,
    hkdf_sha256,
    parse_keys,
    tell_about_keys,
)

OLD = "YV9maXJzdF9zZWNyZXRfZm9yX3Rlc3RzXzAxMjM0NTY="
NEW = "c2Vjb25kX3NlY3JldF9mb3JfdGVzdHNfMDEyMzQ1Njc="


def test_a_file_that_breaks_later_changes_nothing(write_keys, caplog):
    path = write_keys("key", OLD)
    keys = KeyFile(path)
    write_keys("key", "short")
    for _ in range(3):
        assert keys.current() == parse_keys(OLD.encode())
    os.unlink(path)
    assert keys.current() == parse_keys(OLD.encode())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told
    write_keys("key", NEW)
    assert keys.current() == parse_keys(NEW.encode())


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ([], "none"),
        (["# only a remark", ""], "none"),
        (["short"], "got 5"),
        ([OLD, "short"], "line 2"),
        (["two words " + OLD], "without spaces"),
        (["\u00fc" * 40], "printable"),
        (["a" * 2000], "1024"),
        (["ab" * 20], "different"),
        ([f"{OLD}{number}" for number in range(MAX_KEYS + 1)], f"at most {MAX_KEYS}"),
        (["#" * MAX_FILE_BYTES], "larger"),
    ],
)
def test_a_bad_file_is_refused_at_start_and_says_why(write_keys, secrets, said):
    with pytest.raises(KeyFileError, match=said) as caught:
        KeyFile(write_keys("key", *secrets))
    for secret in secrets:
        assert secret not in str(caught.value) or secret in ("", "short")


def test_a_short_secret_is_not_shown(write_keys):
    secret = "Tr0ub4dor&3"
    with pytest.raises(KeyFileError) as caught:
        KeyFile(write_keys("key", secret))
    assert secret not in repr(caught.value)


@pytest.mark.parametrize("path", [OLD, "relative/key", "", 5, None, ["/x"], True])
def test_what_is_no_absolute_path_is_refused_and_not_shown(path):
    with pytest.raises(KeyFileError) as caught:
        KeyFile(path)
    assert OLD not in str(caught.value)


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path):
    with pytest.raises(KeyFileError, match="No such file"):
        KeyFile(str(tmp_path / "missing"))
    with pytest.raises(KeyFileError, match="regular file"):
        KeyFile(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(KeyFileError, match="regular file"):
        KeyFile(str(tmp_path / "pipe"))
    with pytest.raises(KeyFileError, match="not a path"):
        KeyFile("/nul\0byte")


def test_lines_may_end_in_any_way_and_repeat():
    raw = f"# a remark\r\n\r\n  {OLD}  \r\n{NEW}\n{OLD}".encode()
    assert parse_keys(raw) == (derive(OLD.encode()), derive(NEW.encode()))


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o600, ""),
        (0o400, ""),
        (0o440, ""),
        (0o644, "everyone"),
        (0o604, "everyone"),
        (0o620, "group"),
    ],
)
def test_a_file_that_others_can_use_is_warned_about(write_keys, mode, said, caplog):
    path = write_keys("key", OLD)
    os.chmod(path, mode)
    assert stat.S_IMODE(os.stat(path).st_mode) == mode
    keys = KeyFile(path)
    tell_about_keys(keys)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (said in keys.exposure()) if said else (keys.exposure() == "")
    assert len(warnings) == (1 if said else 0)


def test_without_a_key_there_is_one_warning_with_the_way_out(caplog):
    tell_about_keys(None)
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert side_channel_keys.FIELD in caplog.text


def test_the_derivation_is_rfc_5869():
    """Appendix A.1 and A.3 of the RFC."""
    secret = bytes.fromhex("0b" * 22)
    assert hkdf_sha256(
        secret,
        bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"),
        42,
        bytes.fromhex("000102030405060708090a0b0c"),
    ).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    assert hkdf_sha256(secret, b"", 42).hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )


def test_roles_and_secrets_have_keys_of_their_own():
    keys = [derive(secret.encode()) for secret in (OLD, NEW)]
    parts = {part for key in keys for part in (key.server, key.client)}
    assert len(parts) == 4
    assert all(len(part) == 32 for part in parts)
    assert keys[0].name != keys[1].name
