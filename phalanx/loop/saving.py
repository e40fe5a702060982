"""When to checkpoint, where, and what to resume from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx import checkpoint
from phalanx.checkpoint.group import from_rank_zero
from phalanx.errors import NonFiniteLossError
from phalanx.host.remote import RemotePath, as_path
from phalanx.loop.best import BestCheckpoint
from phalanx.loop.formation import Formation
from phalanx.loop.run_state import loop_state
from phalanx.loop.state import expected_bytes, restore_snapshot

if TYPE_CHECKING:
    from phalanx.loop.interval import AutoInterval

_CHECK_EVERY = 8
_AHEAD_STEPS = 32
"""More steps than the host of a rank can be ahead of another's."""


class CheckpointPolicy:
    """The config's checkpoint settings, applied to one run."""

    def __init__(self, formation: Formation, run_dir: Path, ranks_synced: Callable[[int], bool] | None = None) -> None:
        """`ranks_synced`: where ranks are not in lock-step, whether they have waited for each other in a step."""
        self._formation = formation
        self._ranks_synced = ranks_synced or (lambda step: step % _CHECK_EVERY == 0)
        self._collect_at: int | None = None
        self._warm = False
        config, env = formation.config, formation.world.env
        self.best = BestCheckpoint(config)
        self.every = config.checkpoint_every
        wanted = config.checkpoint_dir is not None or self.every is not None or isinstance(config.keep_best, str)
        wanted = wanted or config.load_best_at_end
        # Our launcher gives every attempt the same run folder, and a restart without checkpoints starts from nothing.
        self._for_restarts = not wanted and env.supervised and env.max_restarts > 0
        wanted = wanted or self._for_restarts
        self.directory = as_path(config.checkpoint_dir or run_dir / "checkpoints") if wanted else None
        if self.directory is not None and self.every is None:
            self.every = (1, "epochs")
        self.auto: AutoInterval | None = None
        if self.every is not None and self.every[1] == "auto":
            from phalanx.loop.interval import AutoInterval

            self.auto = AutoInterval(formation)
        self.last_step: int | None = None
        self.last_path: str | None = None
        self.gives_back = False
        """Whether this process trains the model of the caller of fit, who has it after a failure, too."""
        self.weights_left = ""
        """What the model has after a failure that left weights which are not finite; empty: what was trained."""
        self.saved_paths: dict[int, str] = {}
        """The checkpoints of this run by step, as they were after ranks had changed."""

    def check_directory(self) -> None:
        """Raise before training, not after hours, where checkpoints cannot be written.

        Checkpoints that only serve restarts are left out, with a note, where some machine does not see the folder.
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
            f"no checkpoints, for some machine does not see {self.directory}: a restart begins at step 1. Set "
            "checkpoint_dir to a folder that all machines share."
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

    def has_saved(self, step: int) -> bool:
        """Whether this step is in the directory already."""
        return (
            self.last_step == step and self.last_path is not None and as_path(self.last_path).parent == self.directory
        )

    def begin(self, **shared: Any) -> None:
        """Start saving a checkpoint."""
        assert self.directory is not None, "the loop saves only where a directory is set"
        self._formation.save_async(self.directory, **shared)
        self._collect_at = None

    @property
    def in_flight(self) -> bool:
        """Whether a save was begun and `finish` was not called since; equal on all ranks."""
        return self._formation.saver.in_flight

    def advance(self, step: int) -> bool:
        """Note that a step was taken; return whether all ranks call `finish` now, for rank 0 has published the save.

        Rank 0 names a later step in the store: by then every rank has seen it, also one whose device is behind.
        """
        saver, store = self._formation.saver, self._formation.world.store
        if not self._warm and self.directory is not None:  # after the first step optimizers have their state
            self._warm = True
            saver.warm(expected_bytes(self._formation), pinned=self._formation.device.type == "cuda")
        if not saver.in_flight or store is None:
            return saver.is_written
        key = f"checkpoint/{saver.token}"
        if self._formation.is_main and self._collect_at is None and saver.is_written:
            self._collect_at = step + _AHEAD_STEPS
            store.set(key, str(self._collect_at))
        if not self._ranks_synced(step) or not store.check([key]):
            return False
        return step >= int(store.get(key))

    def look_up(self) -> None:
        """Find the checkpoints of this run, also those published while its ranks changed; all ranks call this."""
        directory, run_id = self.directory, self._formation.run_id
        if directory is None:
            return
        self.saved_paths = from_rank_zero(
            lambda: {
                found.step: str(found.path)
                for found in checkpoint.list_checkpoints(directory)
                if found.manifest.run_id == run_id
            }
        )
        if self.saved_paths:
            self.last_step, self.last_path = max(self.saved_paths.items())

    def finish(self) -> checkpoint.SavedCheckpoint | None:
        """Wait for the save in flight, if any, and return it."""
        saved = self._formation.finish_save()
        if saved is not None:
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


class Saves(CheckpointPolicy):
    """Saves the checkpoints of a training loop, and marks the best of them."""

    def __init__(self, loop: Any, run_dir: Path, ranks_synced: Callable[[int], bool] | None) -> None:
        """`loop`: the `TrainLoop`, which has one of these."""
        super().__init__(loop.formation, run_dir, ranks_synced)
        self._loop = loop

    def judge(self, values: dict[str, float], step: int) -> None:
        """Note whether the weights after this step are the best so far."""
        self.best.judge(values, step)
        self.best.record(self._loop.history)

    def after_step(self, step: int, epochs: int | None = None) -> None:
        """Publish a save that is written, and begin one where it is due; `epochs`: complete where the step ended one.

        At the run's end the loop saves.
        """
        if self.advance(step):
            self.publish()
        due = self.due_after_step(step) or (epochs is not None and self.due_after_epoch(epochs))
        if due and not self._loop.is_finished():
            self.save(may_skip=True)

    def save(self, *, may_skip: bool = False) -> None:
        """Start saving a checkpoint, unless this step has one or the weights are not finite."""
        loop = self._loop
        if self.directory is None:
            return
        may_skip = may_skip and loop.config.async_checkpoint == "skip" and not self.best.is_unsaved(loop.step)
        if may_skip and self.in_flight:
            loop.report.say(f"no checkpoint of step {loop.step}: the one before is still being written")
            return
        self.publish()
        if self.has_saved(loop.step):
            self._mark_best(loop.step)
            return
        loop.losses_checked()
        if loop.checks is not None:
            loop.checks.compare_weights(loop.step)
        loop.formation.strategy.consolidate(loop.model)
        if not loop.formation.weights_are_finite():  # the last step made them so, after its loss was computed
            raise self.failed(f"step {loop.step} left weights that are not finite, so they were not saved")
        loop.formation.best_path = self.best.path
        with loop.report.phase("checkpoint"):
            self.begin(**loop_state(loop))
        if not loop.config.async_checkpoint:
            self.publish()
        if self.auto is not None:
            loop.report.say(self.auto.saved(loop.step, loop.formation.clock.pauses["checkpoint"]))

    def save_last(self) -> None:
        """Save after the last step, unless that is done, and wait until it is published."""
        if self.last_step != self._loop.step or self.best.is_unsaved(self._loop.step):
            self.save()
        self.publish()

    def load_best(self) -> None:
        """Load the best checkpoint where that is asked for, after the last step; all ranks call this."""
        loop, step = self._loop, self._loop.step
        if not loop.config.load_best_at_end:
            return
        if self.best.path is None:
            loop.report.say("load_best_at_end: there is no best checkpoint, so the last weights stay", "warning")
            return
        if self.best.step != step:
            with loop.schedule.keeps_rates():  # those of the end, by which the schedule knows which ones it has set
                loop.formation.load(self.best.path)
            loop.formation.gradients.steps = step  # what the run has trained, not what it has now
        loop.history.loaded_best = True

    def publish(self) -> None:
        """Wait until the save in flight, if any, is published; mark it if it is the best, and report it."""
        loop = self._loop
        if not self.in_flight:
            return
        with loop.report.phase("checkpoint"):
            saved = self.finish()
        assert saved is not None, "in flight"
        best = self._mark_best(saved.step)
        loop.report.checkpointed(saved, best=best)
        if best and loop.formation.is_main:  # what had the mark when this one was published is not kept by it now
            published = checkpoint.Checkpoint(saved.path, checkpoint.read_manifest(saved.path))
            config = loop.config
            for note in checkpoint.keep_newest(published, config.keep_last, saved.path, config.options.keep_every):
                loop.report.say(note, "warning")
        loop.hooks.fire("on_checkpoint", loop, str(saved.path))

    def _mark_best(self, step: int) -> bool:
        """Mark the last checkpoint, of this step, if its weights are the best so far; return whether they are."""
        is_best: bool = self.best.saved(as_path(self.last_path or ""), step)
        self.best.record(self._loop.history)
        return is_best

    def failed(self, what: str, step: int | None = None) -> NonFiniteLossError:
        """Report that the run failed, and return the error to raise; `step`: that of a loss; all ranks call this."""
        from phalanx.loop.nonfinite import nonfinite_error  # few runs need it

        return nonfinite_error(self._loop, what, step)

    def restore_best(self, state: dict[str, Any] | None, resumed_from: str) -> None:
        """Continue with the best value so far, and the checkpoint of its step."""
        loop = self._loop
        if state is None or not self.best.load_state_dict(state):
            return
        path = state["path"]
        if path is None and loop.continues:  # it may have been published since
            path = self.saved_paths.get(self.best.step or 0)
        elif path is None and self.best.step == loop.step:
            path = resumed_from
        pending = path is None and loop.continues and self.best.step == loop.step  # the loop saves it now
        if not pending:
            loop.report.say(self.best.find(None if path is None else as_path(path)), "warning")
        self.best.record(loop.history)
