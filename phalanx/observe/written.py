"""The manifest of a run's folder: what the run has written there under names that other programs use, too."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.observe.guard import Guard, say_to_user

WRITTEN = "written.txt"


def note_written(run_dir: Path, path: Path | str) -> None:
    """Note that the run has made a file or folder inside its own; one elsewhere is not noted."""
    name = os.path.relpath(path, run_dir)
    if name.startswith(os.pardir) or name in read_written(run_dir):
        return
    file = run_dir / WRITTEN

    def append() -> None:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(f"{name}\n")

    Guard(str(file), say_to_user).attempt(append)


def read_written(run_dir: Path) -> set[str]:
    """Return the paths that were noted, relative to the folder."""
    file = run_dir / WRITTEN
    return set(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else set()
