"""The one layer through which checks read a machine: files, folders, commands, facts; and what a check returns.

Every answer can be recorded, in one JSON file. It stands for the machine in tests, and in a report about a machine
that is elsewhere.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import UsageError
from phalanx.host.addresses import ssh_address
from phalanx.host.processes import host_memory
from phalanx.host.versions import cuda_of_torch, extras, installed_packages
from phalanx.version import __version__

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    level: Level
    topic: str
    text: str
    fix: str = ""
    """The variable to set or the command to run."""


def worst(results: Iterable[CheckResult]) -> Level:
    """Return the highest level among results."""
    return max((result.level for result in results), key=LEVELS.index, default="ok")


_COMMAND_SECONDS = 20
_VARIABLES = ("NCCL_", "GLOO_", "FI_", "CUDA_", "OMP_", "MASTER_", "SLURM_", "TORCH_", "PHALANX_", "UCX_", "RDMAV_")
_SECRET = ("SECRET", "TOKEN", "PASSWORD", "KEY")
_PACKAGES = ("torch", "numpy", "transformers", "deepspeed", "ray")


class HostReader:
    """A machine to ask: this one, or one that was recorded."""

    def __init__(self, recorded: Mapping[str, Any] | None = None) -> None:
        self._recorded = recorded
        self.answers: dict[str, Any] = {}

    @classmethod
    def load(cls, path: Path) -> HostReader:
        """Return the machine of a recording."""
        try:
            answers = json.loads(path.read_text())
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(
                f"{path} is not a recording: {error}", hint="Write one: phalanx doctor --record FILE"
            ) from error
        if not isinstance(answers, dict) or "fact hostname" not in answers:
            raise UsageError(f"{path} is not a recording of a machine", hint="Write one: phalanx doctor --record FILE")
        return cls(answers)

    def text(self, path: str) -> str | None:
        """Return a file's content without white space around it; None where it cannot be read."""
        content: str | None = self._ask(f"file {path}", lambda: _read(Path(path)))
        return content

    def names(self, folder: str) -> list[str]:
        """Return what a folder holds; empty where there is none, or it cannot be read."""
        return self._ask(f"folder {folder}", lambda: _list(folder)) or []

    def command(self, *words: str) -> str | None:
        """Return what a command prints; None where it is missing or fails."""
        output: str | None = self._ask(f"command {' '.join(words)}", lambda: _run(words))
        return output

    def fact(self, name: str) -> Any:
        """Return one of the facts that the interpreter knows of its machine."""
        return self._ask(f"fact {name}", _FACTS[name])

    def answer(self, key: str) -> Any:
        """Return an answer that was recorded under a key."""
        return (self._recorded or self.answers).get(key)

    def _ask(self, key: str, live: Callable[[], Any]) -> Any:
        if key not in self.answers:
            self.answers[key] = live() if self._recorded is None else self._recorded.get(key)
        return self.answers[key]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _list(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _run(words: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _shm() -> dict[str, int] | None:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return {"total": status.f_blocks * status.f_frsize, "free": status.f_bavail * status.f_frsize}


def _limits() -> dict[str, int]:
    names = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
    return {name: resource.getrlimit(number)[0] for name, number in names.items()}


def _environment() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    return {name: value for name, value in sorted(variables.items()) if not any(word in name for word in _SECRET)}


def _versions() -> dict[str, str]:
    """Return versions by importlib's records: importing torch would take seconds."""
    versions = {"phalanx": __version__, "python": platform.python_version(), "kernel": platform.release()}
    installed = installed_packages()
    versions |= {name: installed[name] for name in _PACKAGES if name in installed}
    if (cuda := cuda_of_torch()) is not None:
        versions["cuda of torch"] = cuda
    nccl = [version for name, version in installed.items() if name.startswith("nvidia-nccl-cu")]
    return {**versions, "nccl": nccl[0]} if nccl else versions


def _own_addresses() -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)})
    except OSError:
        return []


_FACTS: dict[str, Callable[[], Any]] = {
    "hostname": socket.gethostname,
    "address": ssh_address,
    "architecture": platform.machine,
    "time": time.time,
    "cpus": os.cpu_count,
    "allowed_cpus": lambda: len(os.sched_getaffinity(0)),
    "memory": host_memory,
    "shm": _shm,
    "limits": _limits,
    "environment": _environment,
    "versions": _versions,
    "extras": lambda: extras(installed_packages()),
    "load": os.getloadavg,
    "addresses_of_own_name": _own_addresses,
    "root": lambda: os.geteuid() == 0,
    "executable": lambda: sys.executable,
}
