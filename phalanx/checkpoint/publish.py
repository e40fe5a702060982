"""Make a written directory a checkpoint by one atomic rename, never losing what it replaces."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import time
from typing import TYPE_CHECKING

from phalanx.checkpoint.files import sync_directory
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.names import removing_name, replaced_name, step_name
from phalanx.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

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
