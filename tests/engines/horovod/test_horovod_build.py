"""Building Horovod: what is missing is named, other settings have another wheel, a kept wheel is not built again."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from command import ROOT, clean_environment

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = ROOT / "tools" / "build_horovod.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_horovod", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = loaded()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=ROOT,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_missing_tools_are_named(tmp_path):
    done = run(PATH=str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 2
    assert "a C++ compiler (no-such-compiler) and cmake is missing" in done.stderr
    assert "apt install g++; Python packages: pip install cmake" in done.stderr


def test_without_an_index_the_build_reports_the_failed_download(tmp_path):
    empty = tmp_path / "no-packages"
    empty.mkdir()
    done = run(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(empty))
    assert done.returncode == 1
    assert "could not download horovod==0.28.1" in done.stderr


def test_different_settings_have_different_wheels(monkeypatch, cache):
    monkeypatch.setenv("HOROVOD_WITHOUT_MPI", "1")
    plain = build.wheel_folder()
    assert plain.is_relative_to(cache / "phalanx" / "wheels")
    assert "HOROVOD_WITH_MPI" not in build.settings()
    monkeypatch.delenv("HOROVOD_WITHOUT_MPI")
    monkeypatch.setenv("HOROVOD_WITH_MPI", "1")
    assert build.wheel_folder() != plain
    assert "HOROVOD_WITHOUT_MPI" not in build.settings()


@pytest.mark.parametrize("has_headers", [True, False])
def test_mpi_is_built_in_where_it_can_be(tmp_path, monkeypatch, has_headers):
    """Its compiler comes with mpirun, its headers do not."""
    folder = tmp_path / "bin"
    folder.mkdir()
    compiler = folder / "mpicxx"
    compiler.write_text(f"#!/bin/sh\nexit {0 if has_headers else 1}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert build.settings()["HOROVOD_WITH_MPI" if has_headers else "HOROVOD_WITHOUT_MPI"] == "1"


def test_variables_of_runs_do_not_change_the_wheel(monkeypatch):
    plain = build.wheel_folder()
    for name in ("HOROVOD_LOG_LEVEL", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_RANK", "HOROVOD_GLOO_IFACE"):
        monkeypatch.setenv(name, "1")
        assert build.wheel_folder() == plain, name
    for name in ("HOROVOD_GPU_OPERATIONS", "HOROVOD_NCCL_HOME", "HOROVOD_BUILD_CUDA_CC_LIST", "HOROVOD_DEBUG"):
        before = build.wheel_folder()
        monkeypatch.setenv(name, "1")
        assert build.wheel_folder() != before, name


def test_a_kept_wheel_is_installed_and_not_built(monkeypatch):
    """The wheel is not a real one: pip refuses it by name, and nothing was compiled."""
    monkeypatch.setenv("HOROVOD_WITHOUT_MPI", "1")  # PATH, which is taken away below, would say whether it is there
    folder = build.wheel_folder()
    folder.mkdir(parents=True)
    kept = folder / "horovod-0.28.1-py3-none-any.whl"
    with zipfile.ZipFile(kept, "w") as wheel:
        wheel.writestr("nothing", "")
    assert build.kept_wheel() == kept
    done = run(PATH="/nowhere")
    assert done.returncode == 1
    assert f"pip could not install {kept}" in done.stderr
    assert "compiling" not in done.stderr


def test_the_compiler_wrapper_appends_the_standard(tmp_path):
    real = tmp_path / "real"
    real.write_text('#!/bin/sh\necho "$@"\n')
    real.chmod(0o755)
    wrapper = build._write_wrapper(tmp_path, str(real))
    said = subprocess.run([wrapper, "-std=c++14", "a.cc"], capture_output=True, text=True, check=True).stdout
    assert said.split()[:2] == ["-std=c++14", "a.cc"]
    assert said.split()[2] == "-std=c++20"


def test_the_first_error_of_a_long_log_is_shown():
    log = "fine\n" * 50 + "CMake Error at CMakeLists.txt:138\n  no MPI here\n" + "noise\n" * 50
    assert build._explain(log).splitlines()[0].strip() == "CMake Error at CMakeLists.txt:138"
