"""The cache of vLLM sources: an entry is whole or it is not there."""

import zipfile

import pytest

from hybridpd_testkit.vllm_sources import KEPT, cached_source


def wheel_with(names):
    def download(requirement, folder):
        path = folder / "some.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name in (*names, "vllm/_C.abi3.so"):
                archive.writestr(name, f"# {name}\n")
        return path

    return download


def refuse(requirement, folder):
    raise AssertionError("fetched again")


def test_only_the_kept_files_are_kept_and_fetched_once(tmp_path):
    entry = cached_source("vllm==9.9", tmp_path, wheel_with(KEPT))
    files = {str(path.relative_to(entry)) for path in entry.rglob("*") if path.is_file()}
    assert files == set(KEPT)
    assert cached_source("vllm==9.9", tmp_path, refuse) == entry
    assert [path.name for path in tmp_path.iterdir()] == ["vllm-9.9"]


def test_an_interrupted_fetch_leaves_no_entry(tmp_path):
    def broken(requirement, folder):
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_source("vllm==9.9", tmp_path, broken)
    with pytest.raises(KeyError):
        cached_source("vllm==9.9", tmp_path, wheel_with(KEPT[1:]))
    assert list(tmp_path.iterdir()) == []
    assert cached_source("vllm==9.9", tmp_path, wheel_with(KEPT)).is_dir()


def test_two_fetches_at_once_agree(tmp_path):
    def slow(requirement, folder):
        cached_source("vllm==9.9", tmp_path, wheel_with(KEPT))
        return wheel_with(KEPT)(requirement, folder)

    assert (cached_source("vllm==9.9", tmp_path, slow) / KEPT[0]).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["vllm-9.9"]
