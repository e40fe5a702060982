"""Remove what is no longer wanted: old checkpoints of the same run, and what dead writers left."""

from __future__ import annotations

import shutil
from pathlib import Path

from phalanx.checkpoint.find import Checkpoint, list_checkpoints, sizes_match
from phalanx.checkpoint.lock import is_under_way, remove_stale_locks
from phalanx.checkpoint.publish import is_abandoned, owner_of, remove
from phalanx.errors import CheckpointError


def check_keep_last(keep_last: int | None) -> None:
    """Refuse a number that would leave no checkpoint at all."""
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(
            f"keep_last is {keep_last}; it must be 1 or more",
            hint="Write keep_last=1 to keep the newest checkpoint alone, or leave it out to keep all.",
        )


def keep_newest(published: Checkpoint, keep_last: int | None) -> list[str]:
    """Remove the run's checkpoints beyond the newest `keep_last` complete ones; return what could not be removed.

    Those of the runs that it continues count as its own. Other runs' checkpoints are never touched. A damaged one does
    not count as kept, so a complete one always remains.
    """
    notes: list[str] = []
    if keep_last is None:
        return notes
    complete = 0
    found = list_checkpoints(published.path.parent)
    own = {published.manifest.run_id, *_continued(published, found)}
    for checkpoint in found:
        if checkpoint.manifest.run_id not in own:
            continue
        if complete >= keep_last:
            notes += _try_to_remove(checkpoint.path)
        elif sizes_match(checkpoint):
            complete += 1
    return notes


def _continued(published: Checkpoint, found: list[Checkpoint]) -> set[str]:
    """Return the runs that are over and that this one took up at their end; one left earlier is a branch of its own."""
    ended: set[str] = set()
    for ancestor in published.manifest.lineage:
        run_id, step = ancestor["run_id"], ancestor["step"]
        later = any(
            checkpoint.manifest.run_id == run_id and checkpoint.step > step and sizes_match(checkpoint)
            for checkpoint in found
        )
        if not later and not is_under_way(published.path.parent, run_id):
            ended.add(run_id)
    return ended


def clear_leftovers(directory: Path, *, older_than: float) -> list[str]:
    """Remove unfinished directories of writers that are gone; return what could not be removed and why."""
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
            continue  # Another run that shares the directory was quicker.
        except OSError as error:
            notes.append(f"{path} is left over from an unfinished save and cannot be removed: {error.strerror}")
    return notes


def _try_to_remove(path: Path) -> list[str]:
    try:
        remove(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{path} is beyond keep_last and cannot be removed: {error.strerror}"]
    return []
