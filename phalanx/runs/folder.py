"""The folder of a run (config, logs, events and, by default, checkpoints), and temporary folders of logs."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.config import DistributedConfig
from phalanx.errors import PhalanxError, RankFailedError, UsageError
from phalanx.host.files import make_private
from phalanx.launch.scratch import close_scratch, open_scratch


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


def discard_unused(config: DistributedConfig, run_dir: Path) -> None:
    """Remove the folder of a run that was refused before it began, unless run_dir is set or something is in it."""
    events = run_dir / "events.jsonl"
    began = (run_dir / "checkpoints").exists() or (events.exists() and events.stat().st_size > 0)
    if config.run_dir is None and not began:
        shutil.rmtree(run_dir, ignore_errors=True)
        with suppress(OSError):
            run_dir.parent.rmdir()


@contextmanager
def log_folder(run_dir: Path | None) -> Iterator[Path]:
    """Yield the folder for the logs of ranks: in the run's folder, or a temporary one, kept where an error needs it."""
    if run_dir is not None:
        yield run_dir / "logs"
        return
    logs, keep = open_scratch("logs"), False
    try:
        yield logs
    except PhalanxError as error:
        keep = isinstance(error, RankFailedError) or str(logs) in str(error)
        raise
    finally:
        close_scratch(logs, keep=keep)
