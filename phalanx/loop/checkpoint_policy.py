"""When a run writes checkpoints, and into which folder."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx import checkpoint
from phalanx.host.remote import RemotePath, as_path
from phalanx.loop.best import BestCheckpoint
from phalanx.loop.formation import Formation
from phalanx.loop.interval import AutoInterval


class CheckpointPolicy:
    """The config's checkpoint settings, applied to one run."""

    def __init__(self, formation: Formation, run_dir: Path) -> None:
        self._formation = formation
        config, env = formation.config, formation.world.env
        self.best = BestCheckpoint(config)
        self.every = config.checkpoint_every
        saves = config.checkpoint_dir is not None or self.every is not None or isinstance(config.keep_best, str)
        saves = saves or config.load_best_at_end
        # Our launcher gives every attempt the same run folder, and a restart without checkpoints starts from nothing.
        self._for_restarts = not saves and env.supervised and env.max_restarts > 0
        saves = saves or self._for_restarts
        self.directory = as_path(config.checkpoint_dir or run_dir / "checkpoints") if saves else None
        if self.directory is not None and self.every is None:
            self.every = (1, "epochs")
        self.auto: AutoInterval | None = None
        if self.every is not None and self.every[1] == "auto":
            self.auto = AutoInterval(formation)

    def check_directory(self) -> None:
        """Raise before training, not after hours, where checkpoints cannot be written.

        Checkpoints that only serve restarts are left out, with a note, where some node does not see the folder.
        """
        if self.directory is None:
            return
        formation = self._formation
        if formation.is_main or isinstance(self.directory, RemotePath):  # the ranks of other hosts need access too
            checkpoint.check_writable(self.directory)
        if not self._for_restarts:
            return
        formation.reduce(0.0, "sum")  # a barrier: the main rank has made the folder
        if formation.reduce(torch.tensor(int(self.directory.is_dir())), "min") > 0:
            formation.notes.append(f"checkpoints go to {self.directory} once per epoch: a restart resumes from there")
            return
        formation.notes.append(
            f"no checkpoints, for some node does not see {self.directory}: a restart begins at step 1. Set "
            "checkpoint_dir to a folder that all nodes share."
        )
        self.directory = self.every = None

    def due_after_step(self, step: int) -> bool:
        """Whether a checkpoint is due after this many steps, or because the weights are the best so far."""
        due = self.every is not None and self.every[1] == "steps" and step % self.every[0] == 0
        due = due if self.auto is None else self.auto.is_due(step)
        return due or self.best.is_unsaved(step)

    def due_after_epoch(self, epochs: int) -> bool:
        """Whether a checkpoint is due after this many epochs, or because the weights are the best so far."""
        due = self.every is not None and self.every[1] == "epochs" and epochs % self.every[0] == 0
        return due or self.best.is_unsaved(self._formation.step)
