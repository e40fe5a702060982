"""Which runs and processes that write into a checkpoint directory are still in progress: locks, owners and fences."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from phalanx.errors import CheckpointError
from phalanx.host.remote import RemotePath

_PREFIX, _SUFFIX, _FENCE = ".run-", ".lock", ".fence"
_SILENT_SECONDS = 24 * 3600.0
_RENEW_SECONDS = 3600.0
_TRIES, _PAUSE_SECONDS = 5, 0.02


class Owner(NamedTuple):
    """The process that created an unfinished directory."""

    machine: str
    pid: int


def has_ended(owner: Owner, silent_seconds: float) -> bool:
    """Whether a process has ended; on another machine: whether it has changed nothing for a day."""
    if owner.machine == this_machine():
        return owner.pid == os.getpid() or not _is_alive(owner.pid)
    return silent_seconds > _SILENT_SECONDS


@functools.cache
def this_machine() -> str:
    """Return eight hex digits for this host and its pid namespace: containers may share a host name."""
    marks = [socket.gethostname()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            marks.append(os.readlink(source) if source.startswith("/proc/self") else Path(source).read_text())
        except OSError:
            continue  # not Linux, or /proc is hidden: use the host name only
    return hashlib.blake2b("\n".join(marks).encode(), digest_size=4).hexdigest()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class RunLock:
    """Marks a run as in progress until `release` or the end of the process.

    On a file system without locks the file alone marks the run; at a URL it has to be renewed.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self._path = _path(directory, run_id)
        self._file: int | None = None
        self._written = 0.0
        if isinstance(self._path, RemotePath):
            self.renew()
            return
        for _ in range(_TRIES):  # a save of another run may be testing this file, or removing it
            if self._acquire():
                return
            time.sleep(_PAUSE_SECONDS)

    def renew(self) -> None:
        """Write the file at a URL again, at most once per hour: on other machines its age is all that tells."""
        if isinstance(self._path, RemotePath) and time.time() - self._written > _RENEW_SECONDS:
            self._path.write_bytes(f"{this_machine()} {os.getpid()}".encode())
            self._written = time.time()

    def _acquire(self) -> bool:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError:
            os.close(file)
            return True
        if os.fstat(file).st_nlink == 0:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        """Mark the run as over."""
        with suppress(OSError):  # the directory may have been removed or made read-only
            self._path.unlink()
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextlib.contextmanager
def pass_fence(directory: Path, run_id: str, group: Sequence[int]) -> Iterator[None]:
    """Let no group of this run publish in a directory that began before `group`; CheckpointError if this one may not.

    A run whose launcher was taken over may have ranks that still save. `group`: attempt, term and generation, by which
    the groups of a run are ordered; empty: of a run that is never taken over. The order holds while the block runs,
    where the file system has locks.
    """
    if not group:
        yield
        return
    path = directory / f"{_PREFIX}{safe_name(run_id)}{_FENCE}"
    with contextlib.ExitStack() as stack:
        if not isinstance(path, RemotePath):
            file = stack.enter_context(open(path, "a"))
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        newest = _read_fence(path)
        if newest > list(group):
            raise CheckpointError(
                f"{directory} belongs to a later group of this run: {_words(newest)}; this one is of {_words(group)}",
                hint="Another launcher has taken over, and goes on with the run. This checkpoint is not published.",
            )
        if newest < list(group):
            path.write_bytes(json.dumps(list(group)).encode())
        yield


def _read_fence(path: Path) -> list[int]:
    try:
        return [int(number) for number in json.loads(path.read_text() or "[]")]
    except FileNotFoundError:
        return []


def _words(group: Sequence[int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in zip(("attempt", "term", "generation"), group, strict=True))


def is_under_way(directory: Path, run_id: str) -> bool:
    """Whether a run holds its lock; true where the file system cannot tell."""
    return _is_held(_path(directory, run_id))


def remove_stale_locks(directory: Path) -> None:
    """Remove the lock files of runs that ended without removing them."""
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        _is_held(path, remove=True)


def _is_held(path: Path, *, remove: bool = False) -> bool:
    if isinstance(path, RemotePath):
        return _is_held_remotely(path, remove=remove)
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            path.unlink(missing_ok=True)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _is_held_remotely(path: RemotePath, *, remove: bool) -> bool:
    """Whether the process that wrote the file runs; on another machine: whether it wrote less than a day ago."""
    try:
        machine, pid = path.read_text().split()
        age = time.time() - path.stat().st_mtime
    except (FileNotFoundError, ValueError):
        return False
    is_held = _is_alive(int(pid)) if machine == this_machine() else age < _SILENT_SECONDS
    if remove and not is_held:
        path.unlink(missing_ok=True)
    return is_held


def runs_under_way(directory: Path) -> list[str]:
    """Return the ids of the runs that hold a lock in a directory, as they are written in file names."""
    locks = [path for path in directory.glob(f"{_PREFIX}*{_SUFFIX}") if _is_held(path)]
    return [path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for path in locks]


def _path(directory: Path, run_id: str) -> Path:
    return directory / f"{_PREFIX}{safe_name(run_id)}{_SUFFIX}"


def safe_name(run_id: str) -> str:
    """Return a run id with only letters, digits, dots and underscores."""
    return "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in run_id)
