"""A built wheel, apart from the clone, used as a new user does; `make dist` does so in an empty environment."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def try_wheel():
    spec = importlib.util.spec_from_file_location("try_wheel", ROOT / "tools" / "try_wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The clone is copied first: a build leaves folders beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("phalanx", "course"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_has_one_version_and_trains_apart_from_the_clone(wheel, tmp_path):
    from phalanx.version import __version__

    assert wheel.name == f"phalanx-{__version__}-py3-none-any.whl"
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = [sys.executable, "-P", "-c", "import phalanx; print(phalanx.__file__)"]
    found = subprocess.run(where, cwd=empty, env=environment, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(installed)
    try_wheel().use(sys.executable, empty, environment)


def test_the_second_distribution_has_the_same_version():
    import tomllib

    from phalanx.version import __version__

    about = tomllib.loads((ROOT / "compat" / "pyproject.toml").read_text())["project"]
    assert about["version"] == __version__
    assert about["dependencies"] == [f"phalanx=={__version__}"]
