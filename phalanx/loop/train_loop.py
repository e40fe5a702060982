"""The loop: a generator of `StepInfo`. Its pseudocode is in the package's docstring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint import collectives
from phalanx.config import DistributedConfig
from phalanx.features import feature
from phalanx.loop import optional
from phalanx.loop.checkpoint_policy import CheckpointPolicy
from phalanx.loop.evaluate import Evaluation, begin_training, validation_loader
from phalanx.loop.formation import Formation
from phalanx.loop.forward import decide_forward
from phalanx.loop.hooks import Hooks
from phalanx.loop.loss_log import Losses
from phalanx.loop.optim import OptimizerSettings
from phalanx.loop.reporting import Reporter
from phalanx.loop.run_state import load_loop_state
from phalanx.loop.saving import CheckpointWriter
from phalanx.loop.step import StepCapture, StepOutcome, Weighting, train_step
from phalanx.loop.step_info import StepInfo
from phalanx.loop.stopping import RunControl, StopRequest, preempted_error
from phalanx.loop.task import TrainTask, make_schedule, prepare_task
from phalanx.loop.train_state import TrainState, count_steps, max_epochs
from phalanx.loop.values import Values, checked_step, enter_loop, leave_loop, never_logged
from phalanx.observe.heartbeat import current as current_heartbeat
from phalanx.observe.history import History
from phalanx.observe.sinks import EventStream

if TYPE_CHECKING:
    from phalanx.loop.checks import RankChecks


class TrainLoop:
    """Trains a task. `run` does all of it; `steps` lets the caller act after every step.

    What else a run does is in parts with their own state, called in this order after a step: `checks` (of ranks),
    `report` (events and history), `hooks` (callbacks), `control` (whether the run ends), `saving` (checkpoints).
    """

    def __init__(self, formation: Formation, task: TrainTask, events: EventStream, run_dir: Path) -> None:
        self.formation = formation
        self.task = task
        self.run_dir = run_dir
        _leave_default_stream(formation)
        self.model, self.optimizer, user_step = prepare_task(formation, task)
        self.train_loader = formation.prepare_loader(task.train).augmented(task.augment, self.config.seed)
        val_loader = validation_loader(formation, task, self.train_loader)
        total_steps = count_steps(formation, self.train_loader)
        self.schedule = make_schedule(formation, task, self.optimizer, self.train_loader, total_steps)
        optimizer_settings = OptimizerSettings(self.optimizer) if task.optimizer is None else None
        formation.undo_later(self.schedule.put_back)  # the next loop around this optimizer begins with its own rates
        self.hooks = Hooks(task.callbacks, self)
        for sink in self.hooks.sinks if formation.is_main else ():
            events.add(sink)
        synced = None if formation.strategy.in_lockstep else partial(_ranks_synced, formation)
        self.control = RunControl(formation, synced)
        checkpoints = CheckpointPolicy(formation, run_dir)
        formation.start_average(self.model)
        formation.clock.data_wait = lambda: self.train_loader.waited_s
        self.report = Reporter(formation, task.name, self.train_loader.sharded.layout, run_dir, events)
        self.checks = _make_checks(formation, self.model, events)
        self.state = TrainState(
            formation=formation,
            task=task,
            model=self.model,
            optimizer=self.optimizer,
            user_step=user_step,
            train_loader=self.train_loader,
            val_loader=val_loader,
            total_steps=total_steps,
            schedule=self.schedule,
            optimizer_settings=optimizer_settings,
            hooks=self.hooks,
            control=self.control,
            checkpoints=checkpoints,
            report=self.report,
            checks=self.checks,
        )
        """What the parts of this loop share."""
        self.evaluation = Evaluation(self.state, self.losses_checked)
        self.saving = CheckpointWriter(self.state, self.evaluation, self.losses_checked, synced)
        self.restore: Callable[[], dict[str, Any] | None] = self.saving.restore
        """Restores an earlier state, if any; an elastic run replaces it by one that restores from memory."""
        self.reseed = formation.reseed if self.config.fixed_order else None
        """Makes dropout a function of the step and the samples, so that it is equal on any rank and when done again."""
        self._call = ModelCall(self.state)
        self.yields_steps = True
        """Whether the caller gets every step, and may change anything after it."""

    @property
    def config(self) -> DistributedConfig:
        """The settings of the run."""
        return self.formation.config

    @property
    def global_batch(self) -> int:
        """The samples of a step over all ranks."""
        return self.train_loader.sharded.layout.global_batch

    @property
    def step(self) -> int:
        """Optimizer steps taken so far, over all resumptions."""
        return self.formation.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.train_loader.epoch

    @property
    def max_epochs(self) -> int | None:
        """The number of epochs; None if only max_steps counts."""
        return max_epochs(self.config)

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps of the whole run, if it is known beforehand."""
        return self.state.total_steps

    @property
    def history(self) -> History:
        """What has been measured so far."""
        return self.report.history

    @property
    def stop(self) -> StopRequest:
        """The request to stop, from a signal or another thread."""
        return self.control.stop

    def request_stop(self, reason: str = "stopped by a callback") -> None:
        """End training after this step; every rank must call this at the same step. `reason`: for the summary."""
        self.control.end_early(reason)

    def run(self) -> History:
        """Train to the end and return the history."""
        self.yields_steps = False
        for _ in self.steps():
            pass
        return self.history

    def steps(self) -> Iterator[StepInfo]:
        """Train, yielding after every optimizer step."""
        self.state.checkpoints.check_directory()
        if (saved := self.restore()) is not None:
            load_loop_state(self.state, self.evaluation, self.saving.restore_best, saved)
        ending = self.control.ending
        if ending.reported:  # ranks were lost while the result was returned
            self.history.status, self.history.reason = ending.status, ending.reason
            self.formation.average = None
            self.schedule.end(self.step)
            return
        self.evaluation.try_out()
        epochs = self.config.epochs or (1 if self.config.max_steps is None else None)
        self.report.started(self.step, self.state.total_steps, self.model, epochs=epochs)
        if self.is_finished() and not self.state.continues:
            ending.reason = "nothing was left to train"
        self.control.begin(self.report.say)
        if self.saving.gives_back and self.config.on_nonfinite == "stop":
            # Only in the process that holds the user's model.
            last_finite = optional.LastFinite(self.formation.unwrap(self.model), self.formation.optimizers)
            last_finite.keep(self.step)
            self.state.last_finite = last_finite
        entered = enter_loop(self)
        try:
            self.hooks.fire("on_fit_start")
            self.hooks.check_states()
            if self.state.continues:
                self._complete_boundary()
            while not self.is_finished():
                yield from self._epoch()
            self._end()
        except (Exception, KeyboardInterrupt):
            self.report.report_last_logged(self.step)
            raise
        finally:
            leave_loop(entered)
            if self.checks is not None:
                self.checks.close()
            self.stop.silence()

    def _epoch(self) -> Iterator[StepInfo]:
        epoch, heartbeat, average = self.epoch, current_heartbeat(), self.formation.average
        report, hooks, checks, call, evaluation = self.report, self.hooks, self.checks, self._call, self.evaluation
        begin_training(self.model, self.formation.unwrap(self.model))
        state, is_finished = self.state, self.state.is_finished
        call.begin_epoch(is_watched=hooks.has_users or self.yields_steps)
        batches = call.decided(iter(self.train_loader))
        while state.forward is not None and not is_finished(within_epoch=True):
            step = self.step + 1
            self.schedule.apply(step - 1)
            due = report.is_due(step)
            outcome = call.run_step(batches, measure_norm=due, reseed=self.reseed)
            if outcome is None:
                break
            heartbeat.beat(step)
            if average is not None:  # before what other ranks take part in: a step is complete, or was not taken
                average.update(step)
            report.count(samples := self.formation.gradients.current.global_samples)
            info = hooks.unreported = StepInfo(step, epoch, samples, self.schedule.rate, outcome.loss)
            if checks is not None:
                checks.after_step(step)
            if due:
                self._report_logged(epoch)
                report.step_done(info, self._losses(), outcome.grad_norm, self.formation.gradients.skipped_steps)
            elif report.looks_at_losses(step):
                self.losses_checked()
            if hooks.wants_steps:
                hooks.after_step(info)
            hooks.unreported = None
            if self.train_loader.is_consumed or is_finished(within_epoch=True):
                whole = self.train_loader.is_consumed
                batches.close()
                self.train_loader.roll_over()
                self._end_epoch(epoch, whole=whole)
                self._save_or_stop(step, epochs=epoch + 1)
                yield info
                return
            if evaluation.within_epochs:
                evaluation.after_step()
            self._save_or_stop(step)
            if self.control.ending.early:  # by max_time: measure and report the trained part of this epoch
                batches.close()
                self._end_epoch(epoch, whole=False)
            yield info
        if self.epoch != epoch:  # a stream, whose end is known only when it is reached
            self._end_epoch(epoch)
            if state.checkpoints.due_after_epoch(epoch + 1) and not self.is_finished():
                self.saving.save()

    def _complete_boundary(self) -> None:
        """Do what follows the last step, and the ranks were lost in: callbacks, the last evaluation, a checkpoint."""
        if self.hooks.unreported is not None:
            self.hooks.after_step(self.hooks.unreported)
            self.hooks.unreported = None
        self.evaluation.complete()
        reported = [record.step for record in self.history.epochs[-1:]] == [self.step]
        closed = reported and "on_epoch_end" not in self.hooks.called
        if self.is_finished() and self.step and not closed:
            epoch = self.epoch
            self.train_loader.roll_over()
            self._end_epoch(epoch)
            return
        if not self.is_finished():
            self.control.after_epoch(self.epoch)  # the tuner had not answered yet
        if self.step and self.state.checkpoints.due_after_step(self.step):
            self.saving.save()

    def _save_or_stop(self, step: int, epochs: int | None = None) -> None:
        """Save at a step's boundary where it is due; `epochs` of them are complete when the step ended one."""
        if not self.control.must_stop(step):
            self.saving.after_step(step, epochs)
            return
        self.saving.save()
        self.saving.publish()
        self._load_result()
        status, reason = self.control.stopped()
        self.report.ended(status, reason, self.step, self.saving.last_path)
        self.control.ending.reported = True
        self.schedule.end(self.step)
        raise preempted_error(reason, step, self.saving.last_path)

    def _end_epoch(self, epoch: int, *, whole: bool = True) -> None:
        """Evaluate and report after an epoch, or after the last step; `whole`: False if the run ends within it."""
        self.losses_checked()
        last = self.is_finished()
        metrics = self.evaluation.after_epoch(epoch, last=last)
        self.evaluation.judge({"train/loss": self.report.epoch_loss})
        self.report.epoch_done(self.step, epoch, self.schedule.rate, metrics, whole=whole)
        self.report.say(self.train_loader.sharded.problems(), "warning")
        self.hooks.fire_once("on_epoch_end", epoch, metrics)
        self._report_logged(epoch, measured=metrics)
        if not last:
            self.control.after_epoch(epoch + 1)

    def log(self, values: Values, value: Any = None, *, step: int | None = None, reduce: str | None = None) -> None:
        """Record your own numbers: `trainer.log({"teacher": loss})`; a callback may call this. See `phalanx.log`."""
        current = self.step
        if self.formation.clock.phase != "other":  # called by the model, the loss or training_step
            self._call.runs_on_host("the step logs values")
            user_step = self.state.user_step
            current = self.step + 1 if user_step is None else user_step.number
        self.report.log(current if step is None else checked_step(step), values, value, reduce)

    def _report_logged(self, epoch: int, *, measured: Mapping[str, float] | None = None) -> None:
        """Report what the user logged, and judge it if it decides on checkpoints or the end; all ranks call this.

        `measured`: at the end of an epoch, the metrics of the evaluation.
        """
        values = self.report.report_logged(self.step, epoch + 1)
        settings = {"keep_best": self.config.best_metric, "early_stopping": self.config.stopping_metric}
        logged = {setting: watched.name for setting, watched in settings.items() if watched and watched.is_logged}
        if not logged:
            return
        values = collectives.from_rank_zero(lambda: {name: values[name] for name in logged.values() if name in values})
        if values:
            self.evaluation.judge(values)
        for setting, name in logged.items() if measured is not None and epoch == 0 and self.formation.is_main else ():
            if name not in self.report.logged_names:
                self.report.say(never_logged(setting, name, self.report.logged_names, measured or ()), "warning")

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the validation data now; a callback may call this, on all ranks."""
        return self.evaluation.run()

    def _end(self) -> None:
        self.saving.save_last()
        self.saving.load_best()
        self._load_result()
        self.hooks.fire("on_training_end")
        ending = self.control.ending
        self.report.ended(ending.status, ending.reason, self.step, self.saving.last_path)
        ending.reported = True
        self.hooks.fire("on_fit_end")
        self.report.report_logged(self.step, self.epoch)
        self.schedule.end(self.step)

    def _load_result(self) -> None:
        """Give the model the weights that are the result of the run: those of all ranks, averaged where asked."""
        self.formation.strategy.consolidate(self.model)
        if self.formation.average is not None:
            self.formation.average.swap()
            self.formation.average = None

    def _losses(self) -> Losses:
        """Read the losses since the last reading; a NaN ends the run here unless such steps are skipped."""
        losses = self.report.loss_log.read()
        bad = next((step for step, step_loss in losses.items() if not math.isfinite(step_loss.loss)), None)
        if bad is not None and self.config.on_nonfinite == "stop":
            raise self.saving.failed(f"the loss is {losses[bad].loss} at step {bad}", bad)
        if self.state.last_finite is not None:
            self.state.last_finite.keep(self.step)
        return {step: step_loss for step, step_loss in losses.items() if math.isfinite(step_loss.loss)}

    def losses_checked(self) -> None:
        """Read and report the losses so far; a NaN ends the run unless such steps are skipped."""
        self.report.losses(self._losses())

    def is_finished(self, *, within_epoch: bool = False) -> bool:
        """Whether no step is left; `within_epoch`: apart from the number of epochs."""
        return self.state.is_finished(within_epoch=within_epoch)


class ModelCall:
    """How the model is called, batches are weighed and steps are launched: decided on the first batches."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self.weighting = Weighting()
        self._capture: StepCapture | None = None
        self._begun = False

    def runs_on_host(self, why: str) -> None:
        """Launch no step as a CUDA graph: it does something on the host that a graph would not repeat."""
        if self._capture is not None:
            self._capture.refuse(why)

    def begin_epoch(self, *, is_watched: bool) -> None:
        """Decide whether steps can be launched as a CUDA graph, or whether one that was recorded can still be.

        `is_watched`: code of the user runs after steps.
        """
        state = self._state
        if (
            not self._begun
            and state.user_step is None
            and (state.formation.device.type == "cuda" or state.config.capture)
        ):
            self._capture = feature("captured-step")(state, is_watched=is_watched)
        self._begun = True
        if self._capture is not None:
            self._capture.check()
            size = getattr(state.task.augment, "size", None)
            if size is not None and state.epoch and size(state.epoch) != size(state.epoch - 1):
                self._capture.drop()  # images of another size, from here on

    def run_step(
        self, batches: Iterator[Any], *, measure_norm: bool, reseed: Callable[[int, int], None] | None
    ) -> StepOutcome | None:
        """Take the next step, replayed or eagerly; None when the epoch has none left."""
        state, forward, capture = self._state, self._state.forward, self._capture
        if state.user_step is not None:
            return state.user_step.run(batches, state.report.loss_log, reseed)
        assert forward is not None, "decided on the first batch"
        if capture is not None and not capture.is_off:
            return capture.run(forward, batches, weighting=self.weighting, measure_norm=measure_norm, reseed=reseed)
        return train_step(
            state.formation,
            state.model,
            state.optimizer,
            forward,
            batches,
            state.report.loss_log,
            weighting=self.weighting,
            clip=state.config.gradient_clipping,
            measure_norm=measure_norm,
            reseed=reseed,
        )

    def decided(self, batches: Iterator[Any]) -> Any:
        """Decide on the first batch, if that is to be done, and return all batches."""
        if self._state.forward is not None:
            return batches
        state, task = self._state, self._state.task
        for first in batches:
            forward = state.forward = decide_forward(task.model, task.loss_fn, first)
            by_labels = state.formation.weighs_labels(forward, first)
            # Without a wait for each other in every step, ranks cannot add up the labels of all.
            has_shares = state.train_loader.sharded.layout.blocks > 1 and state.config.resolved_server_mode == "sync"
            self.weighting = Weighting(by_labels, by_labels and has_shares)
            if not state.continues and state.user_step is None:
                state.report.say(forward.note)
            state.report.first_batch(task.model, first)
            return _chained(first, batches)
        return batches


def _leave_default_stream(formation: Formation) -> None:
    """Prepare for a CUDA graph of the step, where several ranks may capture it."""
    if formation.device.type == "cuda" and (undo := feature("own-stream")(formation)) is not None:
        formation.undo_later(undo)


def _ranks_synced(formation: Formation, step: int) -> bool:
    """Whether ranks that are not in lock-step have waited for each other in this step."""
    return step % formation.config.log_every_n_steps == 0 or formation.strategy.just_synced


def _make_checks(formation: Formation, model: Any, events: EventStream) -> RankChecks | None:
    """Return the checks of the ranks that the config asks for, if any."""
    config = formation.config
    if formation.world_size == 1 or (config.check_replicas_every or config.straggler_factor) is None:
        return None
    from phalanx.loop.checks import RankChecks  # few runs ask for them

    return RankChecks(formation, model, events.emit)


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """Like itertools.chain, but a generator: closing it closes `rest`."""
    yield first
    yield from rest
