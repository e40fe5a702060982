"""Publish a written directory by one atomic rename, and the names of directories inside a checkpoint directory.

`step-00000100` is published. `.writing-...` and `.removing-...` are not checkpoints: their names end with the machine
and process that made them, so that a later save can remove what a dead writer left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import NamedTuple

from phalanx.checkpoint.files import sync_directory
from phalanx.checkpoint.manifest import read_manifest
from phalanx.errors import CheckpointError

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


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def publish(written: Path, *, step: int, run_id: str) -> Path:
    """Give a complete directory its final name and return it.

    A checkpoint of the same run and step is replaced; anything else of that name keeps it, and ours gets a longer one.
    """
    sync_directory(written)
    target = _free_name(written.parent, step, run_id)
    if target.exists():
        _replace(written, target)
    else:
        written.rename(target)
    sync_directory(target.parent)
    return target


def remove(path: Path) -> None:
    """Remove a checkpoint so that a kill half-way leaves nothing that looks like one."""
    aside = path.with_name(removing_name(path.name))
    path.rename(aside)
    shutil.rmtree(aside)


def _free_name(directory: Path, step: int, run_id: str) -> Path:
    """Return the first name that is free or holds this run's own checkpoint of the step."""
    plain = directory / step_name(step)
    ours = directory / f"{plain.name}-{_safe(run_id)[:6]}"
    for path in (plain, ours):
        if not path.exists() or _belongs_to(path, run_id):
            return path
    return directory / f"{ours.name}-{time.time_ns():x}"


def _belongs_to(path: Path, run_id: str) -> bool:
    try:
        return read_manifest(path).run_id == run_id
    except CheckpointError:
        return False  # Damaged or foreign: not ours to replace.


def _safe(run_id: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in run_id) or "run"


def _replace(written: Path, target: Path) -> None:
    if _exchange(written, target):
        _remove_if_possible(written)  # The exchange has put the old checkpoint there.
        return
    # Without an atomic exchange the old one steps aside under a name that still counts as a checkpoint.
    aside = target.with_name(replaced_name(target.name))
    target.rename(aside)
    written.rename(target)
    _remove_if_possible(aside)


def _remove_if_possible(path: Path) -> None:
    # The new checkpoint is published: what cannot be removed now is left for a later save to clear.
    with contextlib.suppress(OSError):
        remove(path)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one system call; False where the system or the file system cannot."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    if swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(other))
