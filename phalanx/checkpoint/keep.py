"""Remove old checkpoints of the same run, and chunks that no checkpoint uses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from phalanx.checkpoint import chunks
from phalanx.checkpoint.find import (
    Checkpoint,
    Stamp,
    list_checkpoints,
    read_index,
    read_stamps,
    sizes_match,
    survey,
)
from phalanx.checkpoint.locations import storage_and_name, storage_at
from phalanx.checkpoint.lock import is_under_way
from phalanx.checkpoint.manifest import manifest_at
from phalanx.checkpoint.publish import COPYING
from phalanx.errors import CheckpointError
from phalanx.observe.best_mark import MARK


def remove(path: Path) -> None:
    """Remove a checkpoint in a folder or at a URL."""
    storage, name = storage_and_name(path)
    storage.remove(name)


def check_keep_last(keep_last: int | None) -> None:
    """Raise for a number that would leave no checkpoint."""
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(
            f"keep_last is {keep_last}; it must be 1 or more",
            hint="Write keep_last=1 to keep only the newest checkpoint, or leave it out to keep all.",
        )


def keep_newest(
    published: Checkpoint,
    keep_last: int | None,
    best: Path | None = None,
    keep_every: int | None = None,
    stamp_cache: dict[Path, Stamp] | None = None,
) -> list[str]:
    """Remove the run's checkpoints beyond the newest `keep_last` complete ones; return what could not be removed.

    Checkpoints of the runs that it continues are included, those of other runs are never touched. A damaged one does
    not count as kept, so a complete one always remains. `best` is kept too, and not counted where it is older;
    without one, what a run that it continues marked as its best. So are steps that are multiples of `keep_every`.
    `stamp_cache`: as `read_stamps` has it.
    """
    notes: list[str] = []
    if keep_last is None:
        return notes
    complete = 0
    stamps = read_stamps(published.path.parent, {} if stamp_cache is None else stamp_cache)
    run_ids = {published.manifest.run_id, *_continued(published, stamps)}
    for checkpoint in stamps:
        if checkpoint.run_id not in run_ids:
            continue
        if complete < keep_last:
            complete += _is_complete(checkpoint)
            continue
        if keep_every is not None and checkpoint.step % keep_every == 0:
            continue
        earlier = checkpoint.run_id != published.manifest.run_id
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
    if any(stamp.kind == "incremental" for stamp in stamps):
        notes += remove_unused_chunks(published.path.parent, {chunks.folder_of(run_id) for run_id in run_ids})
    return notes


def _is_complete(stamp: Stamp) -> bool:
    manifest = manifest_at(stamp.path)
    return manifest is not None and sizes_match(Checkpoint(stamp.path, manifest))


def beyond(checkpoints: list[Checkpoint], keep_last: int, keep_every: int | None = None) -> list[Checkpoint]:
    """Return the checkpoints that a pruning would remove, of each run with the runs that it continues.

    The newest `keep_last` complete ones stay, those of steps that `keep_every` divides, and every one that is marked as
    the best. A damaged one does not count as kept, so a complete one always remains. `checkpoints`: the newest first.
    """
    check_keep_last(keep_last)
    removed: list[Checkpoint] = []
    rest = list(checkpoints)
    while rest:
        newest = rest[0].manifest
        family = {newest.run_id, *(run["run_id"] for run in newest.lineage)}
        complete = 0
        for checkpoint in [entry for entry in rest if entry.manifest.run_id in family]:
            if complete < keep_last:
                complete += sizes_match(checkpoint)
            elif not (keep_every and checkpoint.step % keep_every == 0) and not (checkpoint.path / MARK).exists():
                removed.append(checkpoint)
        rest = [entry for entry in rest if entry.manifest.run_id not in family]
    return removed


def _continued(published: Checkpoint, stamps: list[Stamp]) -> set[str]:
    """Return the finished runs that this one continues from their last checkpoint, not from an earlier one."""
    ended: set[str] = set()
    for ancestor in published.manifest.lineage:
        run_id, step = ancestor["run_id"], ancestor["step"]
        later = any(
            checkpoint.run_id == run_id and checkpoint.step > step and _is_complete(checkpoint) for checkpoint in stamps
        )
        if not later and not is_under_way(published.path.parent, run_id):
            ended.add(run_id)
    return ended


def remove_unused_chunks(directory: Path, folders: Iterable[str]) -> list[str]:
    """Remove the chunks in these folders that no checkpoint uses; return why where this was not possible."""
    storage = storage_at(directory)
    used: dict[str, set[str]] = {folder: set() for folder in folders}
    try:
        for checkpoint in list_checkpoints(directory):
            if checkpoint.manifest.kind == "incremental":
                index = read_index(checkpoint)
                if index.chunk_folder in used:
                    used[index.chunk_folder] |= {leaf.hash for of in index.leaves.values() for leaf in of}
        for folder, hashes in used.items():
            chunks.prune(storage, folder, hashes)
    except (CheckpointError, OSError) as error:  # a chunk too many does no harm, one too few would
        return [f"unused chunks in {directory} were not removed: {error}"]
    return []


def prune_chunks(directory: Path) -> list[str]:
    """Remove all chunks in a directory that no checkpoint uses; return why where this was not possible."""
    names = storage_at(directory).names()
    folders = [name for name in names if chunks.is_folder(name)]
    # The chunks of a copy are there before its manifest, and those of a newer Phalanx are named where this cannot read.
    others = [name for name in names if name.startswith(COPYING)] + [path.name for path, _ in survey(directory)[1]]
    if folders and others:
        return [f"unused chunks in {directory} were not removed: {others[0]} may use them"]
    return remove_unused_chunks(directory, folders) if folders else []
