"""Publish a written directory by one atomic rename, and the names of directories inside a checkpoint directory.

`step-00000100` is published. `.writing-...` and `.removing-...` are not checkpoints: their names end with the machine
and process that created them, so that a later save can remove what a failed one left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from phalanx.checkpoint.hashed_files import sync_directory
from phalanx.checkpoint.lock import Owner, has_ended, remove_stale_locks, safe_name, this_machine
from phalanx.checkpoint.manifest import manifest_at

COPYING = ".copying-"
"""The names of copies that are not complete begin with it; such a copy is resumed, so it has no owner."""
_PUBLISHED = re.compile(r"^step-(\d{8,})(-.+)?$")
_UNFINISHED = re.compile(r"^\.(?:writing|removing)-.+-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{6}$")


def step_name(step: int) -> str:
    """Return the directory name of a step, zero-padded so that names sort by step."""
    return f"step-{step:08d}"


def is_published(name: str) -> bool:
    """Whether a name is that of a published checkpoint."""
    return _PUBLISHED.match(name) is not None


def writing_name(step: int) -> str:
    """Return a new name for a checkpoint that this process writes."""
    return f".writing-{step_name(step)}-{_token()}"


def replaced_name(name: str) -> str:
    """Return a new name, still that of a checkpoint, for one that is being replaced."""
    return f"{name}-replaced-{secrets.token_hex(3)}"


def owner_of(name: str) -> Owner | None:
    """Return the process that created an unfinished directory, or None for other names."""
    match = _UNFINISHED.match(name)
    return Owner(match["machine"], int(match["pid"])) if match else None


def is_abandoned(directory: Path, owner: Owner) -> bool:
    """Whether the process that wrote an unfinished directory has ended; on another machine: no change for a day."""
    newest = 0.0
    for path in [directory, *directory.glob("*")]:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            newest = max(newest, path.stat().st_mtime)
    return has_ended(owner, time.time() - newest)


def _token() -> str:
    return f"{this_machine()}-{os.getpid()}-{secrets.token_hex(3)}"


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def publish(written: Path, *, step: int, run_id: str) -> Path:
    """Rename a complete directory to its final name and return that.

    A checkpoint of the same run and step is replaced; where anything else has the name, this one gets a longer name.
    """
    sync_directory(written)
    while True:
        target, is_own = _free_name(written.parent, step, run_id)
        if is_own:
            _replace(written, target)
            break
        try:
            written.rename(target)
            break
        except OSError as error:  # another run has taken the name since
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
    sync_directory(target.parent)
    return target


def remove(path: Path) -> None:
    """Remove a checkpoint in a folder; after a failure in the middle nothing that looks like a checkpoint remains."""
    if path.is_symlink():
        path.unlink()
        return
    aside = path.with_name(f".removing-{path.name}-{_token()}")
    path.rename(aside)
    shutil.rmtree(aside)


def _free_name(directory: Path, step: int, run_id: str) -> tuple[Path, bool]:
    """Return the first name that is free or has this run's checkpoint of the step, and whether it has that."""
    plain = directory / step_name(step)
    longer = directory / f"{plain.name}-{(safe_name(run_id) or 'run')[:6]}"
    for path in (plain, longer):
        if not os.path.lexists(path):
            return path, False
        present = manifest_at(path)  # damaged, or of another library: not replaced
        if present is not None and present.run_id == run_id:
            return path, True
    return directory / f"{longer.name}-{time.time_ns():x}", False


def _replace(written: Path, target: Path) -> None:
    old = written  # where an exchange puts the old checkpoint
    if not _exchange(written, target):
        # Without an atomic exchange the old one gets a name that still counts as a checkpoint.
        old = target.with_name(replaced_name(target.name))
        target.rename(old)
        written.rename(target)
    # The new checkpoint is published: what cannot be removed now is left for a later save.
    with contextlib.suppress(OSError):
        remove(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one system call; return False where this is not supported."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    if swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(other))


def clear_leftovers(directory: Path, *, older_than: float) -> list[str]:
    """Remove unfinished directories of processes that have ended; return what could not be removed and why."""
    notes: list[str] = []
    remove_stale_locks(directory)
    for path in directory.glob(".*"):
        owner = owner_of(path.name)
        if owner is None or not path.is_dir() or not is_abandoned(path, owner):
            continue
        try:
            if path.stat().st_mtime <= older_than:
                shutil.rmtree(path)
        except FileNotFoundError:
            continue  # another run that shares the directory has removed it
        except OSError as error:
            notes.append(f"{path} is left over from an unfinished save and cannot be removed: {error.strerror}")
    return notes
