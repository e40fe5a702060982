"""Backups: Keras' BackupAndRestore, where it lies, where it would go on, and how it is told."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import DistributedConfig
from phalanx.engines.tensorflow.data import Start
from phalanx.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from phalanx.engines.tensorflow.callbacks import KerasReport

_METADATA = "training_metadata.json"


def backup_dir(config: DistributedConfig, run_dir: Path, attempt: int) -> Path | None:
    """Return where this run keeps its backup, or None; only a run that resumes writes over another's."""
    root = _root(config, run_dir)
    if root is None:
        return None
    wish = config.resume_from_checkpoint
    if isinstance(wish, str):
        given = Path(wish)
        found = given if _is_backup(given) else _newest(given)
        if found is None:
            raise CheckpointError(
                f"resume_from_checkpoint = {wish!r}: there is no backup of a Keras model",
                hint="Give the folder that an earlier run named, or the checkpoint_dir that holds it.",
            )
        return found
    own = root / run_dir.name
    if wish:
        return _newest(root) or own
    if attempt == 0 and _is_backup(own):
        raise UsageError(
            f"{own} holds the backup of an earlier run",
            hint="To go on from it: resume_from_checkpoint=True. To begin anew: another run_dir, or remove it.",
        )
    return own


def _root(config: DistributedConfig, run_dir: Path) -> Path | None:
    every = config.checkpoint_every
    if every is not None and every[1] == "steps":
        raise UsageError(
            f"checkpoint_frequency = {config.checkpoint_frequency!r}: Keras' backups are made after epochs",
            hint="Write a number of epochs: checkpoint_frequency = 1.",
        )
    if config.checkpoint_dir is not None:
        return Path(config.checkpoint_dir)
    wanted = every is not None or config.max_restarts or config.resume_from_checkpoint
    return run_dir / "checkpoints" if wanted else None


def _is_backup(path: Path) -> bool:
    return (path / _METADATA).is_file() or (path / "chief" / "checkpoint").is_file()


def _newest(root: Path) -> Path | None:
    found = [path for path in root.iterdir() if _is_backup(path)] if root.is_dir() else []
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def start_of(directory: Path | None) -> Start:
    """Return where the backup goes on; the data must begin there too."""
    if directory is None or not _is_backup(directory):
        return Start()
    if (directory / _METADATA).is_file():
        return Start(int(json.loads((directory / _METADATA).read_text(encoding="utf-8"))["epoch"]))
    import tensorflow as tf

    saved = tf.train.latest_checkpoint(str(directory / "chief"))
    epoch = tf.train.load_variable(saved, "ckpt_saved_epoch/.ATTRIBUTES/VARIABLE_VALUE")
    return Start(int(epoch) + 1)


def as_callback(keras: Any, directory: Path, every: int, report: KerasReport) -> Any:
    """Return BackupAndRestore of the Keras that trains, every n-th epoch; it tells of what it saves."""

    class Backup(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            last = epoch + 1 == self.params.get("epochs") or self.model.stop_training
            if not report.epoch_is_whole or ((epoch + 1) % every and not last):
                return
            began = time.monotonic()
            super().on_epoch_end(epoch, logs)
            report.saved(str(directory), size_of(directory), time.monotonic() - began)

    if keras.__name__ == "tf_keras":
        return Backup(str(directory), delete_checkpoint=False)
    # Keras 3 overwrites its file in place: a kill while it does must find the one before.
    return Backup(str(directory), delete_checkpoint=False, double_checkpoint=True)


def size_of(directory: Path) -> int:
    """Return the bytes of a backup."""
    total = 0
    for folder, _, names in os.walk(directory):  # other ranks write and remove files of their own meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(folder, name))
    return total
