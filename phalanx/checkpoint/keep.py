"""Remove old checkpoints of the same run, and what failed saves left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

from phalanx.checkpoint.find import Checkpoint, list_checkpoints, sizes_match
from phalanx.checkpoint.lock import is_under_way, remove_stale_locks
from phalanx.checkpoint.publish import is_abandoned, owner_of, remove
from phalanx.errors import CheckpointError
from phalanx.observe.best import MARK


def check_keep_last(keep_last: int | None) -> None:
    """Raise for a number that would leave no checkpoint."""
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(
            f"keep_last is {keep_last}; it must be 1 or more",
            hint="Write keep_last=1 to keep only the newest checkpoint, or leave it out to keep all.",
        )


def keep_newest(published: Checkpoint, keep_last: int | None, best: Path | None = None) -> list[str]:
    """Remove the run's checkpoints beyond the newest `keep_last` complete ones; return what could not be removed.

    Checkpoints of the runs that it continues are included, those of other runs are never touched. A damaged one does
    not count as kept, so a complete one always remains. `best` is kept too, and not counted where it is older;
    without one, what a run that it continues marked as its best.
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
        if complete < keep_last:
            complete += sizes_match(checkpoint)
            continue
        earlier = checkpoint.manifest.run_id != published.manifest.run_id
        if (
            (earlier and (checkpoint.path / MARK).exists())
            if best is None
            else checkpoint.path.resolve() == best.resolve()
        ):
            continue
        try:
            remove(checkpoint.path)
        except FileNotFoundError:
            continue  # another run that shares the directory has removed it
        except OSError as error:
            notes.append(f"{checkpoint.path} is beyond keep_last and cannot be removed: {error.strerror}")
    return notes


def _continued(published: Checkpoint, found: list[Checkpoint]) -> set[str]:
    """Return the finished runs that this one continues from their last checkpoint, not from an earlier one."""
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
