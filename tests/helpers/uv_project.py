"""A project with a uv.lock that needs no network: its one dependency is a wheel of phalanx that is made here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_PROJECT = """[project]
name = "mine"
version = "1"
requires-python = ">=3.11"
dependencies = ["phalanx"]
[tool.uv.sources]
phalanx = {path = "phalanx-1-py3-none-any.whl"}
"""


def find_uv() -> Path:
    """Return the program; skip the test where it is not installed."""
    beside = [Path(folder).parents[2] / "bin/uv" for folder in sys.path if folder.endswith("site-packages")]
    found = [path for path in (*beside, Path(shutil.which("uv") or "/none")) if path.exists()]
    if not found:
        pytest.skip("uv is not installed: pip install uv")
    return found[0]


def uv_variables(home: Path) -> dict[str, str]:
    """Return variables by which uv uses this Python, a cache of its own and no network."""
    return {
        "HOME": str(home),
        "PATH": f"{find_uv().parent}:/usr/bin:/bin",
        "UV_CACHE_DIR": str(home / "uv-cache"),
        "UV_OFFLINE": "1",
        "UV_PYTHON": os.path.realpath(sys.executable),
        "UV_LINK_MODE": "copy",
    }


def write_project(folder: Path, home: Path) -> None:
    """Write a locked project; its phalanx is the one of this environment."""
    sites = [entry for entry in sys.path if entry.endswith("site-packages")]
    about = "phalanx-1.dist-info/"
    with zipfile.ZipFile(folder / "phalanx-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("phalanx.pth", "\n".join([str(ROOT), *sites]) + "\n")
        wheel.writestr(f"{about}METADATA", "Metadata-Version: 2.1\nName: phalanx\nVersion: 1\n")
        wheel.writestr(f"{about}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}entry_points.txt", "[console_scripts]\nphalanx = phalanx.cli:main\n")
        wheel.writestr(f"{about}RECORD", "")
    (folder / "pyproject.toml").write_text(_PROJECT)
    command = [find_uv(), "lock"]
    subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **uv_variables(home), "TMPDIR": str(home)},
        check=True,
        capture_output=True,
    )
