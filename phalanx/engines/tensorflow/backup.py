"""Backups of Keras' BackupAndRestore: their folder, the epoch to resume from, and the same for the own loop."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensorflow as tf

from phalanx.config import DistributedConfig
from phalanx.errors import CheckpointError, UsageError

_METADATA = "training_metadata.json"


def backup_dir(config: DistributedConfig, run_dir: Path, attempt: int) -> Path | None:
    """Return the folder of this run's backup, or None; only a run that resumes overwrites another's."""
    root = _root(config, run_dir)
    if root is None:
        return None
    resume = config.resume_from_checkpoint
    if isinstance(resume, str):
        path = Path(resume)
        backup = path if _is_backup(path) else _newest(path)
        if backup is None:
            raise CheckpointError(
                f"resume_from_checkpoint = {resume!r}: there is no backup of a Keras model",
                hint="Give the folder that an earlier run named, or the checkpoint_dir that holds it.",
            )
        return backup
    folder = root / run_dir.name
    if resume:
        return _newest(root) or folder
    if attempt == 0 and _is_backup(folder):
        raise UsageError(
            f"{folder} holds the backup of an earlier run",
            hint="To resume it: resume_from_checkpoint=True. To start again: use another run_dir, or remove it.",
        )
    return folder


def _root(config: DistributedConfig, run_dir: Path) -> Path | None:
    every = config.checkpoint_every
    if every is not None and every[1] != "epochs":
        raise UsageError(
            f"checkpoint_frequency = {config.checkpoint_frequency!r}: Keras' backups are made after epochs",
            hint="Write a number of epochs: checkpoint_frequency = 1.",
        )
    if config.checkpoint_dir is not None:
        return Path(config.checkpoint_dir)
    is_needed = every is not None or config.max_restarts or config.resume_from_checkpoint
    return run_dir / "checkpoints" if is_needed else None


def _is_backup(path: Path) -> bool:
    return (path / _METADATA).is_file() or (path / "chief" / "checkpoint").is_file()


def _newest(root: Path) -> Path | None:
    backups = [path for path in root.iterdir() if _is_backup(path)] if root.is_dir() else []
    return max(backups, key=lambda path: path.stat().st_mtime, default=None)


def first_epoch(directory: Path | None) -> int:
    """Return the epoch with which the backup resumes; the data must begin there too."""
    if directory is None or not _is_backup(directory):
        return 0
    if (directory / _METADATA).is_file():
        return int(json.loads((directory / _METADATA).read_text(encoding="utf-8"))["epoch"])
    saved = tf.train.latest_checkpoint(str(directory / "chief"))
    epoch = tf.train.load_variable(saved, "ckpt_saved_epoch/.ATTRIBUTES/VARIABLE_VALUE")
    return int(epoch) + 1


def size_of(directory: Path) -> int:
    """Return the bytes of a backup."""
    total = 0
    for folder, _, names in os.walk(directory):  # other ranks write and remove files meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(folder, name))
    return total


class OwnBackup:
    """What BackupAndRestore does, for the own loop: weights, optimizer and epoch in TensorFlow's checkpoints."""

    def __init__(self, model: Any, directory: Path, *, leads: bool) -> None:
        self._epoch = tf.Variable(-1, dtype=tf.int64, trainable=False)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, ckpt_saved_epoch=self._epoch)
        shared = directory / "chief"
        # All workers must take part in a save; those that do not lead write to a folder that is removed.
        folder = shared if leads else directory / f".scratch-{os.getpid()}"
        self._leads = leads
        self._writer = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
        self._latest = tf.train.latest_checkpoint(str(shared))
        self._checkpoint = checkpoint

    def restore(self) -> None:
        """Load the newest backup, if there is one."""
        if self._latest is not None:
            self._checkpoint.restore(self._latest).assert_existing_objects_matched()

    def save(self, epoch: int) -> None:
        """Save the state after an epoch."""
        self._epoch.assign(epoch)
        self._writer.save()
        if not self._leads:
            shutil.rmtree(self._writer.directory, ignore_errors=True)
