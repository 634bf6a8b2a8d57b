"""The connector image's entry point: whole copies only, over whatever an earlier run left."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "connector_image_install", ROOT / "connector" / "image" / "install.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for package in ("hybridpd_geometry", "hybridpd_connector", "hybridpd_operator"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(f'"""{package}."""\n')
        (folder / package / "__init__.py").chmod(0o600)
    return folder


def test_copies_the_two_packages_readable_by_every_uid(
    installer: ModuleType, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "volume" / "python"
    installer.install(source, target)
    assert sorted(path.name for path in target.iterdir()) == [
        "hybridpd_connector",
        "hybridpd_geometry",
    ]
    for path in target.rglob("*.py"):
        assert path.stat().st_mode & 0o444 == 0o444


def test_replaces_what_an_interrupted_run_left(
    installer: ModuleType, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "python"
    (target / ".hybridpd_connector.partial").mkdir(parents=True)
    (target / "hybridpd_geometry").mkdir()
    (target / "hybridpd_geometry" / "stale.py").write_text("")
    installer.install(source, target)
    assert not (target / "hybridpd_geometry" / "stale.py").exists()
    assert not (target / ".hybridpd_connector.partial").exists()


def test_a_missing_package_is_an_error(installer: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="hybridpd_geometry"):
        installer.install(tmp_path / "nothing", tmp_path / "python")


def test_dockerfiles_fetch_nothing_and_run_unprivileged() -> None:
    files = [
        ROOT / "operator" / "Dockerfile",
        ROOT / "connector" / "Dockerfile",
        ROOT / "e2e" / "images" / "router.Dockerfile",
    ]
    for path in files:
        steps = [
            line.split()[0]
            for line in path.read_text().splitlines()
            if line and line[0] not in "# "
        ]
        assert steps[:2] == ["ARG", "FROM"], path
        assert "RUN" not in steps, path
        assert "USER 65532:65532" in path.read_text(), path
