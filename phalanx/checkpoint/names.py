"""The names of directories inside a checkpoint directory, and who is behind an unfinished one.

`step-00000100` is published. `.writing-...` and `.removing-...` are not checkpoints: their names end with the machine
and process that made them, so that a later save can tell a dead writer's leftovers from work in progress.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import NamedTuple

_PUBLISHED = re.compile(r"^step-(\d{8,})(-.+)?$")
_UNFINISHED = re.compile(r"^\.(?:writing|removing)-.+-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{6}$")
_SILENT_SECONDS = 24 * 3600.0


class Owner(NamedTuple):
    """The process that made an unfinished directory."""

    machine: str
    pid: int


def step_name(step: int) -> str:
    """Return the directory name of a step, zero-padded so that names sort by step."""
    return f"step-{step:08d}"


def is_published(name: str) -> bool:
    """Say whether a directory name is one that a published checkpoint has."""
    return _PUBLISHED.match(name) is not None


def writing_name(step: int) -> str:
    """Return a fresh name for a checkpoint being written by this process."""
    return f".writing-{step_name(step)}-{_token()}"


def removing_name(name: str) -> str:
    """Return a fresh name for a checkpoint being removed by this process."""
    return f".removing-{name}-{_token()}"


def replaced_name(name: str) -> str:
    """Return a fresh name, still that of a checkpoint, for one that steps aside for its replacement."""
    return f"{name}-replaced-{secrets.token_hex(3)}"


def owner_of(name: str) -> Owner | None:
    """Return who made an unfinished directory, or None when the name is not of that kind."""
    match = _UNFINISHED.match(name)
    return Owner(match["machine"], int(match["pid"])) if match else None


def is_abandoned(directory: Path, owner: Owner) -> bool:
    """Say whether nobody is working on an unfinished directory any more.

    Whether a process of this machine lives is known for certain. Of another machine only silence speaks: nothing
    written for a day.
    """
    if owner.machine == this_machine():
        return owner.pid == os.getpid() or not _is_alive(owner.pid)
    return time.time() - _last_change(directory) > _SILENT_SECONDS


@functools.cache
def this_machine() -> str:
    """Return eight hex digits for this host and its process numbers: containers may share a name but not their pids."""
    marks = [socket.gethostname()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            marks.append(os.readlink(source) if source.startswith("/proc/self") else Path(source).read_text())
        except OSError:
            continue  # Not Linux, or /proc is hidden: the host name alone must do.
    return hashlib.blake2b("\n".join(marks).encode(), digest_size=4).hexdigest()


def _token() -> str:
    return f"{this_machine()}-{os.getpid()}-{secrets.token_hex(3)}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _last_change(directory: Path) -> float:
    """Return when anything in the directory was last written; 0 when it has vanished meanwhile."""
    newest = 0.0
    for path in [directory, *directory.glob("*")]:
        try:
            newest = max(newest, path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return newest
