"""Small files written as a whole, folders that only their owner can open, temporary folders, and what may be trusted.

A temporary folder whose owner was killed is removed by a later run of the same user.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import grp
import os
import pwd
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from phalanx.host.remote import RemotePath


@contextlib.contextmanager
def replacing(path: Path, *, flush: bool = False) -> Iterator[BinaryIO]:
    """Open a new file next to `path` for writing, and rename it to `path` when the block ends without an error.

    `flush` waits until the disk has the content and the new name, so that a power failure loses neither.
    """
    # By chance and not by process id: those of two containers that share a folder may be equal.
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        with fresh.open("xb") as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if flush:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write `path` as a whole, also at a URL."""
    if isinstance(path, RemotePath):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_private(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder, with its parents, that only its owner can open; one that exists keeps its permissions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)


def writer_of(path: Path) -> int | None:
    """Return the user who, apart from root, alone can write a file or put files into a folder; None: several can.

    Links are followed. A file also depends on its folder, in which others could put another file in its place. What
    is above a folder does not count: others can move the folder there, but what they put in its place is theirs.
    Raises OSError if there is no such file.
    """
    target = path.resolve(strict=True)
    status = target.stat()
    statuses = [status] if stat.S_ISDIR(status.st_mode) else [target.parent.stat(), status]
    users = {status_of_part.st_uid for status_of_part in statuses} - {0}
    is_closed = not statuses[0].st_mode & 0o077  # others cannot even open what is inside
    if len(users) > 1 or (not is_closed and any(is_writable_for_others(status_of_part) for status_of_part in statuses)):
        return None
    return users.pop() if users else 0


def is_trusted(path: Path) -> bool:
    """Whether this user or root alone can have written a file, or put files into a folder; also if it is missing.

    Every command that acts by a file (runs code, sends a signal, follows a path, removes) asks this first.
    """
    try:
        return writer_of(path) in (os.geteuid(), 0)
    except FileNotFoundError:
        return True
    except OSError:  # a folder that is closed to this user, a loop of links
        return False


def open_below(folder: Path, name: str) -> BinaryIO:
    """Open a file below a folder by a relative name without `..`, to read; OSError for a link on the way to it.

    What checks a path and opens it afterwards can be led elsewhere in between.
    """
    *parts, last = Path(name).parts
    where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=where)
            os.close(where)
            where = inner
        descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=where)
    finally:
        os.close(where)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe would block
        os.close(descriptor)
        raise OSError(f"{folder / name} is not a file")
    return os.fdopen(descriptor, "rb")


def is_writable_for_others(status: os.stat_result) -> bool:
    """Whether users besides its owner and root may write a file, or replace what others have put into a folder."""
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:  # as /tmp: others cannot replace a file there
        return False
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid, status.st_uid)


def _is_own_group(group: int, user: int) -> bool:
    """Whether a group is that of one user alone, as most systems make one per user, with the umask 002; or root's."""
    if group == 0:
        return True
    try:
        entry = grp.getgrgid(group)
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        return False
    return entry.gr_name == name and not set(entry.gr_mem) - {name}


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
