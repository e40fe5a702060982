"""Temporary folders of this process. One whose owner was killed is removed by a later run of the same user."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "phalanx-"
_OWNER = ".owner"
"""A file that the owner holds locked: the kernel unlocks it, however the owner ends."""
_locks: dict[Path, int] = {}


def open_scratch(kind: str) -> Path:
    """Make a folder that only this user can read, for `close_scratch` to remove."""
    sweep(Path(tempfile.gettempdir()))
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
    fresh = path / f"{_OWNER}.new"
    lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: without the file the folder is never removed by others
        os.close(lock)
        fresh.unlink()
        return path
    os.write(lock, socket.gethostname().encode())  # on a shared file system locks may be known to their host alone
    fresh.rename(path / _OWNER)  # locked from the moment that others can see it
    _locks[path] = lock
    return path


def close_scratch(path: Path, *, keep: bool = False) -> None:
    """Remove a folder with all that is in it, or keep it for the user to read."""
    if keep:
        (path / _OWNER).unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
    lock = _locks.pop(path, None)
    if lock is not None:
        os.close(lock)


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """Make a folder for the duration of the block."""
    path = open_scratch(kind)
    try:
        yield path
    finally:
        close_scratch(path)


@functools.cache
def sweep(directory: Path) -> None:
    """Remove the folders in `directory` whose owners have ended; once per process."""
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another run's, which it removes itself at this moment
            if path.lstat().st_uid == os.getuid() and not path.is_symlink():
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    try:
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.read(lock, 256) == socket.gethostname().encode():
            shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)
