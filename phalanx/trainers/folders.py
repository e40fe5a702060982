"""A run's folder: where its config, logs, events and, by default, checkpoints lie. No torch here."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import UsageError
from phalanx.observe.folders import make_private

if TYPE_CHECKING:
    from phalanx.config import DistributedConfig


def make_run_dir(config: DistributedConfig, name: str) -> Path:
    """Make the folder of this run: the configured one, or a new runs/<name>-<time> that nobody else has."""
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
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise UsageError(
            f"the run's folder {path} cannot be made: {error.strerror}",
            hint="Set run_dir to a folder you can write to.",
        ) from None
    return path


def discard_unused(config: DistributedConfig, run_dir: Path) -> None:
    """Remove the folder of a run that was refused before it began: one we chose, with no event and no checkpoint."""
    events = run_dir / "events.jsonl"
    began = (run_dir / "checkpoints").exists() or (events.exists() and events.stat().st_size > 0)
    if config.run_dir is None and not began:
        shutil.rmtree(run_dir, ignore_errors=True)
        with suppress(OSError):
            run_dir.parent.rmdir()
