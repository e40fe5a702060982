"""The loop's saves: begin one at a step's boundary, collect it when it is published, mark the best, report it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.host.remote import as_path

if TYPE_CHECKING:
    from phalanx.loop.trainer import TrainLoop


class Saves:
    """Saves checkpoints of a training loop; `CheckpointPolicy` says when and where."""

    def __init__(self, loop: TrainLoop) -> None:
        self._loop = loop

    def begin(self, *, may_skip: bool = False) -> None:
        """Start saving a checkpoint, unless this step has one or the weights are not finite."""
        loop = self._loop
        if loop.saving.directory is None:
            return
        may_skip = may_skip and loop.config.async_checkpoint == "skip" and not loop.best.is_unsaved(loop.step)
        if may_skip and loop.saving.in_flight:
            loop.report.say(f"no checkpoint of step {loop.step}: the one before is still being written")
            return
        self.finish()
        if loop.saving.has_saved(loop.step):
            self.note_best(loop.step)
            return
        loop.losses_checked()
        loop.checks.compare_weights(loop.step)
        loop.formation.strategy.consolidate(loop.model)
        if not loop.formation.weights_are_finite():  # the last step made them so, after its loss was computed
            raise loop.failed(f"step {loop.step} left weights that are not finite, so they were not saved")
        loop.formation.best_path = loop.best.path
        with loop.report.phase("checkpoint"):
            loop.saving.begin(**loop.to_keep())
        if not loop.config.async_checkpoint:
            self.finish()
        if loop.saving.auto is not None:
            loop.report.say(loop.saving.auto.saved(loop.step, loop.report.ledger.stalled))

    def finish(self) -> None:
        """Wait until the save in flight, if any, is published; mark it if it is the best, and report it."""
        loop = self._loop
        if not loop.saving.in_flight:
            return
        with loop.report.phase("checkpoint"):
            saved = loop.saving.finish()
        assert saved is not None, "in flight"
        loop.report.checkpointed(saved, best=self.note_best(saved.step))
        loop.hooks.fire("on_checkpoint", loop, str(saved.path))

    def note_best(self, step: int) -> bool:
        """Mark the last checkpoint, of this step, if its weights are the best so far; return whether they are."""
        loop = self._loop
        is_best = loop.best.saved(as_path(loop.saving.last_path or ""), step)
        loop.best.record(loop.history)
        return is_best
