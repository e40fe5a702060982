"""The folder of a run: making it, and the list of files that the run has written there under common names."""

from __future__ import annotations

import itertools
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.host.files import make_private
from phalanx.observe.guard import Guard, say_to_user


def make_run_dir(config: DistributedConfig, name: str) -> Path:
    """Make the folder of this run: the configured one, or a new runs/<name>-<time>."""
    if config.run_dir is not None:
        return _make(Path(config.run_dir), exist_ok=True)
    plain = re.sub(r"[^\w.-]+", "-", config.name or name).strip("-") or "run"
    stem = f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            return _make(path, exist_ok=False)
    raise AssertionError("counting does not end")


def _make(path: Path, *, exist_ok: bool) -> Path:
    try:
        make_private(path, exist_ok=exist_ok)
    except OSError as error:
        if path.is_dir() and not exist_ok:
            raise  # another run has that name; where a parent is a file, no other name would help
        raise UsageError(
            f"the run's folder {path} cannot be made: {error.strerror}",
            hint="Set run_dir to a folder you can write to.",
        ) from None
    return path


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
