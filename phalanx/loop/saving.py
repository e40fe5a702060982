"""When to checkpoint, where, and what to resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from phalanx import checkpoint
from phalanx.loop.formation import Formation
from phalanx.loop.interval import AutoInterval
from phalanx.loop.state import restore_snapshot


class CheckpointPolicy:
    """The config's checkpoint settings, applied to one run."""

    def __init__(self, formation: Formation, run_dir: Path) -> None:
        self._formation = formation
        config, env = formation.config, formation.world.env
        self.every = config.checkpoint_every
        wanted = config.checkpoint_dir is not None or self.every is not None or isinstance(config.keep_best, str)
        # Our launcher gives every attempt the same run folder, and a restart without checkpoints starts from nothing.
        self._for_restarts = not wanted and env.supervised and env.max_restarts > 0
        wanted = wanted or self._for_restarts
        self.directory = Path(config.checkpoint_dir or run_dir / "checkpoints") if wanted else None
        if self.directory is not None and self.every is None:
            self.every = (1, "epochs")
        self.auto = AutoInterval(formation) if self.every is not None and self.every[1] == "auto" else None
        self.last_step: int | None = None
        self.last_path: str | None = None

    def check_directory(self) -> None:
        """Raise before training, not after hours, where checkpoints cannot be written.

        Checkpoints that only serve restarts are left out, with a note, where some machine does not see the folder.
        """
        if self.directory is None:
            return
        formation = self._formation
        if formation.is_main:
            checkpoint.check_writable(self.directory)
        if not self._for_restarts:
            return
        formation.reduce(0.0, "sum")  # a barrier: the main rank has made the folder
        if formation.reduce(torch.tensor(int(self.directory.is_dir())), "min") > 0:
            formation.notes.append(f"checkpoints go to {self.directory} once per epoch: a restart resumes from there")
            return
        formation.notes.append(
            f"no checkpoints, for some machine does not see {self.directory}: a restart begins at step 1. Set "
            "checkpoint_dir to a folder that all machines share."
        )
        self.directory = self.every = None

    def due_after_step(self, step: int) -> bool:
        """Whether a checkpoint is due after this many steps."""
        if self.auto is not None:
            return self.auto.is_due(step)
        return self.every is not None and self.every[1] == "steps" and step % self.every[0] == 0

    def due_after_epoch(self, epochs: int) -> bool:
        """Whether a checkpoint is due after this many epochs."""
        return self.every is not None and self.every[1] == "epochs" and epochs % self.every[0] == 0

    def has_saved(self, step: int) -> bool:
        """Whether this step is in the directory already."""
        return self.last_step == step and self.last_path is not None and Path(self.last_path).parent == self.directory

    def save(self, **shared: Any) -> checkpoint.SavedCheckpoint:
        """Publish a checkpoint now."""
        assert self.directory is not None, "the loop saves only where a directory is set"
        saved = self._formation.save(self.directory, **shared)
        self.last_step, self.last_path = saved.step, str(saved.path)
        return saved

    def restore(self) -> dict[str, Any] | None:
        """Resume from what an earlier attempt of this run saved, else as the config asks; return the state, if any.

        A restart without resume_from_checkpoint ignores the checkpoints of other runs in the directory.
        """
        resume = self._formation.config.resume_from_checkpoint
        state = None
        env = self._formation.world.env
        if restarted := env.attempt + env.generation > 0 and self.directory is not None:
            assert self.directory is not None
            state = restore_snapshot(self._formation, self.directory, required=False, this_run=True)
        if state is None and isinstance(resume, str):
            state = self._formation.load(resume)
        elif state is None and resume:
            assert self.directory is not None, "checked before the run began"
            state = self._formation.load(self.directory, required=False)
        if state is None:
            if resume or restarted:
                whose = "" if resume else " of this run"
                self._formation.notes.append(
                    f"no checkpoint{whose} in {self.directory} yet: starting from the beginning"
                )
            return None
        self.last_step, self.last_path = self._formation.step, state["path"]
        return state
