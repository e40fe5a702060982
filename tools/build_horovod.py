"""Build Horovod against the installed torch: `python tools/build_horovod.py`. The wheel is cached.

Horovod's last release has no wheels, and its CMake files ask for C++14, which torch's headers do not support: the
compiler is called through a wrapper that appends the standard. MPI is built in where its compiler and headers are
installed. HOROVOD_* variables of the build take precedence, such as HOROVOD_WITHOUT_MPI=1 or
HOROVOD_GPU_OPERATIONS=NCCL.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from phalanx.errors import PhalanxError, UsageError
from phalanx.host.files import replace_file

VERSION = "0.28.1"
_FLAGS = "-std=c++20 -O2 -g0 -w"
_DEFAULTS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
}
_OF_THE_BUILD = re.compile(
    r"HOROVOD_(WITH_|WITHOUT_|BUILD_|GPU|CPU_|CUDA_|NCCL_|ROCM_|CMAKE$|DEBUG$|ALLOW_MIXED_GPU_IMPL$)"
)
"""Variables that Horovod's setup and CMake files read; others, such as HOROVOD_LOG_LEVEL, are for runs."""
_ERROR = re.compile(r"CMake Error|: (fatal )?error:|undefined reference")
"""What a compiler, a linker or CMake writes in the line that says why it stopped."""
_NOTICE_SECONDS = 20.0
_LOG_LINES = 12


def main() -> int:
    """Install Horovod from the cached wheel, or build it first; return the exit code."""
    try:
        wheel = kept_wheel() or build()
        # By force: a Horovod of the same version that was built against another torch would count as installed.
        _pip_install(wheel, "--force-reinstall", "--no-deps")
        _pip_install(wheel, f"torch=={torch_version()}")
    except PhalanxError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        return error.exit_code
    _notice(f"Horovod {VERSION} is installed ({wheel})")
    return 0


def settings() -> dict[str, str]:
    """Return the HOROVOD_* variables of the build: the defaults, overridden by those of the environment."""
    given = {name: value for name, value in os.environ.items() if _OF_THE_BUILD.match(name)}
    # The compiler of MPI comes with mpirun, but its headers may be missing.
    compiler = shutil.which("mpicxx")
    words = ["-x", "c++", "-include", "mpi.h", "-fsyntax-only", os.devnull]
    has_mpi = compiler and subprocess.run([compiler, *words], capture_output=True, check=False).returncode == 0
    mpi = "HOROVOD_WITH_MPI" if has_mpi else "HOROVOD_WITHOUT_MPI"
    chosen = {**_DEFAULTS, mpi: "1", **given}
    for name in ("TENSORFLOW", "MXNET", "MPI"):
        for word, opposite in (("WITH", "WITHOUT"), ("WITHOUT", "WITH")):
            if f"HOROVOD_{word}_{name}" in given:
                chosen.pop(f"HOROVOD_{opposite}_{name}", None)
    return chosen


def wheel_folder() -> Path:
    """Return the cache folder of the wheel for this torch, Python, machine and settings."""
    what = [VERSION, torch_version(), sys.implementation.cache_tag, platform.machine(), _FLAGS, _compiler_name()]
    what += [f"{name}={value}" for name, value in sorted(settings().items())]
    key = hashlib.sha256("\n".join(map(str, what)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "phalanx" / "wheels" / f"horovod-{VERSION}-torch-{torch_version()}-{key}"


def torch_version() -> str:
    """Return the version of the installed torch without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError("Horovod is built against torch, and torch is not installed here") from None


def kept_wheel() -> Path | None:
    """Return the wheel of an earlier build, if any."""
    return next(iter(sorted(wheel_folder().glob("horovod-*.whl"))), None)


def build() -> Path:
    """Compile the wheel, put it into the cache, and return it."""
    compiler = _check_tools()
    folder = wheel_folder()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    with tempfile.TemporaryDirectory(prefix="phalanx-horovod-") as scratch:
        wrapper = _write_wrapper(Path(scratch), compiler)
        _notice(f"compiling Horovod {VERSION} against torch {torch_version()}; this takes minutes (log: {log})")
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
        command += ["--wheel-dir", scratch, f"horovod=={VERSION}"]
        _run(command, {**os.environ, **_build_environment(wrapper)}, log)
        built = next(Path(scratch).glob("horovod-*.whl"))
        replace_file(folder / built.name, built.read_bytes())
    return folder / built.name


def _pip_install(wheel: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PhalanxError(f"pip could not install {wheel}:\n{_last_lines(done.stderr)}")


def _compiler_name() -> str:
    return os.environ.get("CXX", "g++")


def _check_tools() -> str:
    """Return the compiler; UsageError where it, CMake, setuptools or pip is missing."""
    compiler = shutil.which(_compiler_name())
    missing = [] if compiler else [f"a C++ compiler ({_compiler_name()})"]
    missing += [] if shutil.which("cmake", path=_tool_path()) else ["cmake"]
    for module in ("setuptools", "pip"):
        try:
            importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"the Python package {module}")
    if missing or compiler is None:
        raise UsageError(
            f"Horovod {VERSION} has to be compiled, and {' and '.join(missing)} is missing",
            hint="On Debian or Ubuntu: apt install g++; Python packages: pip install cmake setuptools pip.",
        )
    return compiler


def _tool_path() -> str:
    """Return the PATH with the Python environment's own programs first: it need not be activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _write_wrapper(folder: Path, compiler: str) -> Path:
    """Write a compiler for Horovod's CMake: the real one with `_FLAGS` after all other options."""
    wrapper = folder / "cxx"
    wrapper.write_text(f'#!/bin/sh\nexec "{compiler}" "$@" {_FLAGS}\n')
    wrapper.chmod(0o755)
    return wrapper


def _build_environment(wrapper: Path) -> dict[str, str]:
    return {
        **settings(),
        "CXX": str(wrapper),
        "PATH": _tool_path(),
        # Overrides a calling make's value: without a number of jobs one core would be used.
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        # Newer CMakes refuse files written for old versions unless this is set.
        "CMAKE_POLICY_VERSION_MINIMUM": os.environ.get("CMAKE_POLICY_VERSION_MINIMUM", "3.5"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def _run(command: list[str], environment: dict[str, str], log: Path) -> None:
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        while True:
            try:
                code = process.wait(_NOTICE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                _notice(f"still compiling ({time.monotonic() - began:.0f} s)")
            except BaseException:
                process.terminate()
                process.wait()
                raise
    if code != 0:
        raise PhalanxError(f"Horovod {VERSION} was not built:\n{_explain(log.read_text(errors='replace'))}\nLog: {log}")


def _explain(text: str) -> str:
    """Return the cause from pip's log: a failed download, the first error, or the last lines."""
    if "No matching distribution found" in text or "NewConnectionError" in text or "ProxyError" in text:
        return f"  pip could not download horovod=={VERSION}: is the network, or pip's index, reachable?"
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if _ERROR.search(line)), None)
    return _last_lines(text) if first is None else _last_lines("\n".join(lines[first : first + _LOG_LINES]))


def _last_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-_LOG_LINES:])


def _notice(text: str) -> None:
    print(f"phalanx: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
