"""Write the checkpoints of a training loop, mark the best of them, and restore the one to resume from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx import checkpoint
from phalanx.checkpoint.collectives import from_rank_zero
from phalanx.checkpoint.lock import pass_fence
from phalanx.errors import NonFiniteLossError
from phalanx.features import feature
from phalanx.host.remote import as_path
from phalanx.loop.evaluate import Evaluation
from phalanx.loop.run_state import loop_state
from phalanx.loop.state import expected_bytes, restore_snapshot
from phalanx.loop.train_state import TrainState

_CHECK_EVERY = 8
_AHEAD_STEPS = 32
"""More steps than the host of a rank can be ahead of another's."""


class CheckpointWriter:
    """Writes the checkpoints that a `CheckpointPolicy` asks for."""

    def __init__(
        self,
        state: TrainState,
        evaluation: Evaluation,
        check_losses: Callable[[], None],
        ranks_synced: Callable[[int], bool] | None,
    ) -> None:
        """`evaluation`: its progress is saved too. `check_losses`: raises if a loss was not finite.

        `ranks_synced`: if ranks are not in lock-step, whether they have waited for each other in a step.
        """
        self._state, self._evaluation, self._check_losses = state, evaluation, check_losses
        self._formation, self._policy = state.formation, state.checkpoints
        self._ranks_synced = ranks_synced or (lambda step: step % _CHECK_EVERY == 0)
        self._collect_at: int | None = None
        self._warm = False
        self.last_step: int | None = None
        self.last_path: str | None = None
        self.gives_back = False
        """Whether this process trains the model of the caller of fit, who has it after a failure, too."""
        self.weights_left = ""
        """What the model has after a failure that left weights which are not finite; empty: the trained weights."""
        self.saved_paths: dict[int, str] = {}
        """The checkpoints of this run by step, as they were after ranks had changed."""

    def has_saved(self, step: int) -> bool:
        """Whether this step is in the directory already."""
        return (
            self.last_step == step
            and self.last_path is not None
            and as_path(self.last_path).parent == self._policy.directory
        )

    def begin(self, **shared: Any) -> None:
        """Start saving a checkpoint."""
        assert self._policy.directory is not None, "the loop saves only where a directory is set"
        self._formation.save_async(self._policy.directory, **shared)
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
        if not self._warm and self._policy.directory is not None:  # after the first step optimizers have their state
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
        directory, run_id = self._policy.directory, self._formation.run_id
        if directory is None:
            return
        self.saved_paths = from_rank_zero(
            lambda: {
                stored.step: str(stored.path)
                for stored in checkpoint.list_checkpoints(directory)
                if stored.manifest.run_id == run_id
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
        if self._policy.directory is not None and self._formation.is_main and self._policy.directory.exists():
            with pass_fence(self._policy.directory, self._formation.run_id, env.group):
                pass  # from now on no earlier group of this run publishes here
        if restarted := env.attempt + env.generation > 0 and self._policy.directory is not None:
            assert self._policy.directory is not None
            state = restore_snapshot(self._formation, self._policy.directory, required=False, this_run=True)
        if state is None and isinstance(resume, str):
            state = self._formation.load(resume)
        elif state is None and resume:
            assert self._policy.directory is not None, "checked before the run began"
            state = self._formation.load(self._policy.directory, required=False)
        if state is None:
            if resume or restarted:
                whose = "" if resume else " of this run"
                self._formation.notes.append(
                    f"no checkpoint{whose} in {self._policy.directory} yet: starting from the beginning"
                )
            return None
        self.last_step, self.last_path = self._formation.step, state["path"]
        return state

    def after_step(self, step: int, epochs: int | None = None) -> None:
        """Publish a save that is written, and begin one where it is due; `epochs`: complete where the step ended one.

        At the run's end the loop saves.
        """
        if self.advance(step):
            self.publish()
        due = self._policy.due_after_step(step) or (epochs is not None and self._policy.due_after_epoch(epochs))
        if due and not self._state.is_finished():
            self.save(may_skip=True)

    def save(self, *, may_skip: bool = False) -> None:
        """Start saving a checkpoint, unless this step has one or the weights are not finite."""
        state = self._state
        if self._policy.directory is None:
            return
        may_skip = may_skip and state.config.async_checkpoint == "skip" and not self._policy.best.is_unsaved(state.step)
        if may_skip and self.in_flight:
            state.report.say(f"no checkpoint of step {state.step}: the one before is still being written")
            return
        self.publish()
        if self.has_saved(state.step):
            self._mark_best(state.step)
            return
        self._check_losses()
        if state.checks is not None:
            state.checks.compare_weights(state.step)
        state.formation.strategy.consolidate(state.model)
        if not state.formation.weights_are_finite():  # the last step made them so, after its loss was computed
            raise self.failed(f"step {state.step} left weights that are not finite, so they were not saved")
        state.formation.best_path = self._policy.best.path
        with state.report.phase("checkpoint"):
            self.begin(**loop_state(state, self._evaluation))
        if not state.config.async_checkpoint:
            self.publish()
        if self._policy.auto is not None:
            state.report.say(self._policy.auto.saved(state.step, state.formation.clock.pauses["checkpoint"]))

    def save_last(self) -> None:
        """Save after the last step, unless that is done, and wait until it is published."""
        if self.last_step != self._state.step or self._policy.best.is_unsaved(self._state.step):
            self.save()
        self.publish()

    def load_best(self) -> None:
        """Load the best checkpoint where that is asked for, after the last step; all ranks call this."""
        state, step = self._state, self._state.step
        if not state.config.load_best_at_end:
            return
        if self._policy.best.path is None:
            state.report.say("load_best_at_end: there is no best checkpoint, so the last weights stay", "warning")
            return
        if self._policy.best.step != step:
            with state.schedule.keeps_rates():  # those of the end, by which the schedule knows which ones it has set
                state.formation.load(self._policy.best.path)
            state.formation.gradients.steps = step  # what the run has trained, not what it has now
        state.history.loaded_best = True

    def publish(self) -> None:
        """Wait until the save in flight, if any, is published; mark it if it is the best, and report it."""
        state = self._state
        if not self.in_flight:
            return
        with state.report.phase("checkpoint"):
            saved = self.finish()
        assert saved is not None, "in flight"
        best = self._mark_best(saved.step)
        state.report.checkpointed(saved, best=best)
        if best and state.formation.is_main:  # what had the mark when this one was published is not kept by it now
            published = checkpoint.Checkpoint(saved.path, checkpoint.read_manifest(saved.path))
            config = state.config
            for note in checkpoint.keep_newest(published, config.keep_last, saved.path, config.keep_every):
                state.report.say(note, "warning")
        state.hooks.fire("on_checkpoint", str(saved.path))

    def _mark_best(self, step: int) -> bool:
        """Mark the last checkpoint, of this step, if its weights are the best so far; return whether they are."""
        is_best: bool = self._policy.best.saved(as_path(self.last_path or ""), step)
        self._policy.best.record(self._state.history)
        return is_best

    def failed(self, problem: str, step: int | None = None) -> NonFiniteLossError:
        """Report that the run failed, and return the error to raise; `step`: that of a loss; all ranks call this."""
        self.publish()
        error: NonFiniteLossError = feature("diagnosis").nonfinite_error(self._state, problem, step, self.last_path)
        if self.gives_back and not self._formation.weights_are_finite():
            self.weights_left = feature("diagnosis").give_back(self._state, self.last_path)
        return error

    def restore_best(self, saved: dict[str, Any] | None, resumed_from: str) -> None:
        """Continue with the best value so far, and the checkpoint of its step; `saved`: of `BestCheckpoint`."""
        state, best = self._state, self._policy.best
        if state.continues:
            self.look_up()
        if saved is None or not best.load_state_dict(saved):
            return
        path = saved["path"]
        if path is None and state.continues:  # it may have been published since
            path = self.saved_paths.get(best.step or 0)
        elif path is None and best.step == state.step:
            path = resumed_from
        pending = path is None and state.continues and best.step == state.step  # the loop saves it now
        if not pending:
            state.report.say(best.find(None if path is None else as_path(path)), "warning")
        best.record(state.history)
