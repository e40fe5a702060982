"""Compare a checkpoint's files with its manifest."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.checkpoint import group
from phalanx.checkpoint.hashing import hash_file
from phalanx.checkpoint.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.checkpoint.files import FileRecord
    from phalanx.checkpoint.find import Checkpoint


def verify(path: Path | str, files: Iterable[str] | None = None, *, manifest: Manifest | None = None) -> list[str]:
    """Return what is wrong with a checkpoint: missing files, wrong sizes, wrong hashes; nothing when it is whole.

    With a process group this is collective: every rank hashes its share of the files and all return the same list.
    """
    path = Path(path)
    known = (manifest or read_manifest(path)).files
    names = sorted(known if files is None else files, key=lambda name: (-known[name].size, name))
    mine = names[group.rank() :: group.world_size()]
    found = {name: problem for name in mine if (problem := _problem(path / name, known[name]))}
    merged = {name: problem for part in group.gather_to_all(found) for name, problem in part.items()}
    return [merged[name] for name in sorted(merged)]


def sizes_match(checkpoint: Checkpoint) -> bool:
    """Say whether every file is there with its size: a check that costs no reading, for this process alone."""
    return not any(_size_problem(checkpoint.path / name, record) for name, record in checkpoint.manifest.files.items())


def _problem(file: Path, record: FileRecord) -> str | None:
    try:
        problem = _size_problem(file, record)
        if problem is None and hash_file(file) != record.hash:
            problem = f"{file.name} does not match its hash: it was changed after it was written"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return problem


def _size_problem(file: Path, record: FileRecord) -> str | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return f"{file.name} is missing"
    if not stat.S_ISREG(found.st_mode):
        return f"{file.name} is not a regular file"
    size = found.st_size
    if size == record.size:
        return None
    how = "truncated" if size < record.size else "longer than written"
    return f"{file.name} is {how}: {size:,} bytes where the manifest says {record.size:,}"
