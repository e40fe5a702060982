"""A run's folder: where its config, logs, events and, by default, checkpoints lie. No torch here."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from phalanx.config import DistributedConfig


def choose_run_dir(config: DistributedConfig, name: str) -> Path:
    """Return the folder of this run: as configured, or runs/<name>-<time>, never one that exists already."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    plain = re.sub(r"[^\w.-]+", "-", config.name or name).strip("-") or "run"
    stem = f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1000):
        path = Path("runs") / (stem if number == 0 else f"{stem}-{number}")
        if not path.exists():
            return path
    raise UsageError(f"runs/{stem} and 999 numbered folders after it exist already", hint="Set run_dir.")


def make_run_dir(path: Path) -> Path:
    """Create a run's folder, or say why it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the run's folder {path} cannot be made: {error.strerror}",
            hint="Set run_dir to a folder you can write to.",
        ) from None
    return path
