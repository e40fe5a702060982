"""Locks in a checkpoint directory that show which runs are still in progress."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

_PREFIX, _SUFFIX = ".run-", ".lock"
_TRIES, _PAUSE_SECONDS = 5, 0.02


class RunLock:
    """Marks a run as in progress until `release` or the end of the process.

    On a file system without locks the file alone marks the run.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self._path = _path(directory, run_id)
        self._file: int | None = None
        for _ in range(_TRIES):  # a save of another run may be testing this file, or removing it
            if self._acquire():
                return
            time.sleep(_PAUSE_SECONDS)

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


def is_under_way(directory: Path, run_id: str) -> bool:
    """Whether a run holds its lock; true where the file system cannot tell."""
    return _is_held(_path(directory, run_id))


def remove_stale_locks(directory: Path) -> None:
    """Remove the lock files of runs that ended without removing them."""
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        _is_held(path, remove=True)


def _is_held(path: Path, *, remove: bool = False) -> bool:
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


def _path(directory: Path, run_id: str) -> Path:
    return directory / f"{_PREFIX}{safe_name(run_id)}{_SUFFIX}"


def safe_name(run_id: str) -> str:
    """Return a run id with only letters, digits, dots and underscores."""
    return "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in run_id)
