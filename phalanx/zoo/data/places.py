"""Where data are: a file, a folder, a pattern such as 'shots/*.jpg', or a list of these. No torch."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from phalanx.errors import UsageError, nearest
from phalanx.zoo.hub import on_disk

Root = str | Path | Sequence[str | Path]


class FoundFiles(NamedTuple):
    """The files at a place. `folder`: the one that was named, whose files' names may tell the splits."""

    files: list[Path]
    folder: Path | None
    title: str
    """The place in an error message."""


def find_places(root: Root) -> list[Path]:
    """Return the files and folders that are named; a pattern stands for what it matches."""
    paths: list[Path] = []
    for entry in [root] if isinstance(root, str | Path) else root:
        path = Path(on_disk(entry, "data")).expanduser() if isinstance(entry, str) else entry.expanduser()
        if path.exists():
            paths.append(path)
        elif is_pattern(path):
            matched = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
            if not matched:
                raise UsageError(f"data = '{entry}': no file matches this pattern")
            paths += matched
        else:
            near = nearest(path.name, [other.name for other in path.parent.glob("*")])
            raise UsageError(
                f"data = '{entry}': there is nothing at that path{f'. Did you mean {near!r}?' if near else ''}"
            )
    return paths


def is_pattern(path: str | Path) -> bool:
    """Whether a path has *, ? or [."""
    return glob.has_magic(str(path))


def absolute(path: str | Path) -> str:
    """Return a path or a pattern as an absolute one."""
    expanded = Path(path).expanduser()
    return str(Path.cwd() / expanded if is_pattern(expanded) and not expanded.exists() else expanded.resolve())


def find_files(root: Root) -> FoundFiles:
    """Return every file at a place, in order; of a folder those below it, without hidden ones."""
    places = find_places(root)
    if len(places) == 1 and places[0].is_dir():
        return FoundFiles(files_below(places[0]), places[0], str(places[0]))
    files = [file for path in places for file in (files_below(path) if path.is_dir() else [path])]
    return FoundFiles(files, None, str(places[0]) if len(places) == 1 else f"{places[0]} and {len(places) - 1} more")


def files_below(folder: Path) -> list[Path]:
    """Return the files in a folder and below, without hidden ones."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def one_folder(root: Root, dataset: str) -> Path:
    """Return the folder that a data set is read from; refuse anything else."""
    places = find_places(root)
    if len(places) == 1 and places[0].is_dir():
        return places[0]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    kind = "a file" if places[0].is_file() else "not one folder"
    raise UsageError(f"{dataset} reads a folder, and {places[0]}{more} is {kind}")
