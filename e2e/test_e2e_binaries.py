"""The builder of the cluster's programs, with a stand-in for `go` that costs nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tooling import binaries, envs

# Writes the file named by -o, unless that file's name is the one in $BROKEN; notes each call.
FAKE_GO = """#!/bin/sh
for word in "$@"; do
  [ "$previous" = -o ] && output="$word"
  previous="$word"
done
echo "$output" >> "$CALLS"
[ "$(basename "$output")" = "$BROKEN" ] && exit 2
echo program > "$output"
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, two programs in one family, and the file in which `go` notes its calls."""
    (tmp_path / "path").mkdir()
    go = tmp_path / "path" / "go"
    go.write_text(FAKE_GO)
    go.chmod(0o755)
    (tmp_path / "go" / "tools").mkdir(parents=True)
    (tmp_path / "go" / "tools" / "go.mod").write_text("module tools\n")
    monkeypatch.setattr(binaries, "GO_FOLDER", tmp_path / "go")
    family = binaries.Family("tools", {"first": "a/first", "second": "a/second"})
    monkeypatch.setattr(binaries, "FAMILIES", {"tools": family})
    monkeypatch.setenv("HYBRIDPD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("BROKEN", "")
    return tmp_path / "calls"


def test_a_family_is_built_once(calls: Path) -> None:
    folder = binaries.build_family("tools")
    assert sorted(path.name for path in folder.iterdir()) == ["first", "second"]
    assert binaries.program("second") == folder / "second"
    assert len(calls.read_text().splitlines()) == 2


def test_a_failed_build_is_never_taken_for_a_whole_one(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", "second")
    with pytest.raises(binaries.BinariesError, match="second: `go build` gave 2"):
        binaries.build_family("tools")
    final = binaries.family_folder(binaries.FAMILIES["tools"])
    assert not final.exists()
    assert list(final.parent.glob(".building-*")) == []
    monkeypatch.setenv("BROKEN", "")
    assert (binaries.build_family("tools") / "second").exists()
    assert calls.exists()


@pytest.mark.usefixtures("calls")
def test_what_a_killed_build_left_is_removed() -> None:
    leftover = envs.cache_folder() / "bin" / ".building-tools-killed"
    leftover.mkdir(parents=True)
    (leftover / "first").write_text("half")
    assert (binaries.build_family("tools") / "first").read_text() == "program\n"
    assert not leftover.exists()


@pytest.mark.usefixtures("calls")
def test_the_key_covers_module_files_flags_and_programs() -> None:
    family = binaries.FAMILIES["tools"]
    keys = {family.key()}
    keys.add(dataclasses.replace(family, stamps=("-X a.version=v2",)).key())
    keys.add(dataclasses.replace(family, programs={"first": "a/first"}).key())
    (family.folder / "go.sum").write_text("a v1.0.0 h1:x\n")
    keys.add(family.key())
    assert len(keys) == 4


@pytest.mark.usefixtures("calls")
def test_an_unknown_program_is_refused_with_the_known_ones() -> None:
    with pytest.raises(binaries.BinariesError, match=r"\['first', 'second'\], got 'third'"):
        binaries.program("third")
