"""The loop: a generator of `StepInfo`. Its pseudocode is in the package's docstring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.errors import NonFiniteLossError
from phalanx.loop.best import BestCheckpoint, MetricWatch
from phalanx.loop.checks import RankChecks
from phalanx.loop.ema import WeightAverage
from phalanx.loop.evaluate import batches_to_measure, begin_training, evaluate
from phalanx.loop.formation import Formation
from phalanx.loop.forward import Forward, decide_forward
from phalanx.loop.hooks import Hooks, StepInfo
from phalanx.loop.loss_log import Losses, LossLog
from phalanx.loop.notices import StopNotices
from phalanx.loop.optim import LRSchedule, OptimizerSettings, rate_factor, rate_scale
from phalanx.loop.optimizer_binding import OwnSchedule, make_scheduler
from phalanx.loop.reporting import Reporter, RunFacts
from phalanx.loop.run_state import LoopState, RunEnding
from phalanx.loop.saving import CheckpointPolicy, Saves
from phalanx.loop.step import train_step
from phalanx.loop.stopping import EpochControl, StopRequest, TimeLimit, preempted_error
from phalanx.loop.task import TrainTask, make_optimizer
from phalanx.observe.heartbeat import current as current_heartbeat
from phalanx.observe.history import History
from phalanx.observe.sinks import EventStream

_INTERRUPTED = ("interrupted", "stopped by Ctrl-C")


class TrainLoop:
    """Trains a task. `run` does all of it; `steps` lets the caller act after every step."""

    def __init__(self, formation: Formation, task: TrainTask, events: EventStream, run_dir: Path) -> None:
        self.formation = formation
        self.config = formation.config
        self.task = task
        self.model = formation.prepare(task.model)
        self.optimizer = formation.prepare(make_optimizer(task, self.config, formation.device))
        self.train_loader = formation.prepare_loader(task.train)
        self.val_loader = None if task.val is None else formation.prepare_loader(task.val, training=False)
        layout = self.train_loader.sharded.layout
        self.global_batch = layout.global_batch
        self.total_steps = self.count_steps()
        scale = rate_scale(self.config, self.global_batch, layout.batch_size)
        self.schedule: LRSchedule | OwnSchedule
        if task.scheduler is None:
            self.schedule = LRSchedule(self.optimizer, rate_factor(self.config, self.total_steps), scale)
        else:
            scheduler = make_scheduler(task.scheduler, self.optimizer)
            formation.schedulers.append(scheduler)  # into checkpoints; the loop steps it, not the user
            by_step = task.scheduler_interval == "step"
            self.schedule = OwnSchedule(scheduler, lambda step: step if by_step else self.epoch)
        self.optimizer_settings = OptimizerSettings(self.optimizer) if task.optimizer is None else None
        formation.undo_later(self.schedule.put_back)  # the next loop around this optimizer begins with its own rates
        self.hooks = Hooks(task.callbacks)
        for sink in self.hooks.sinks if formation.is_main else ():
            events.add(sink)
        self.ledger = LossLog(formation.world)
        self.stop = StopRequest(formation.world, None if formation.strategy.in_lockstep else self._ranks_synced)
        world = formation.world
        self.control = EpochControl(world.store, asks=world.is_main, given_up=lambda: self.stop.requested)
        self.run_dir = run_dir
        self.saving = CheckpointPolicy(
            formation, run_dir, None if formation.strategy.in_lockstep else self._ranks_synced
        )
        self.best = BestCheckpoint(self.config)
        self.saves = Saves(self)
        watched = self.config.stopping_metric
        self.stopping = watched and MetricWatch("early_stopping", watched, min_delta=self.config.min_delta)
        if self.config.ema_decay is not None:
            formation.average = WeightAverage(formation.unwrap(self.model), self.config.ema_decay)
        facts = RunFacts(
            name=task.name,
            run_dir=run_dir,
            config=self.config,
            world=world,
            strategy=formation.strategy,
            precision=formation.precision.name,
            batch_size=layout.batch_size,
            global_batch=self.global_batch,
            clock=formation.clock,
        )
        formation.clock.data_wait = lambda: self.train_loader.waited_s
        self.report = Reporter(facts, events)
        self.checks = RankChecks(formation, self.model, events.emit)
        self.restore: Callable[[], dict[str, Any] | None] = self.saving.restore
        """Restores an earlier state, if any; an elastic run replaces it by one that restores from memory."""
        self.before_end: Callable[[], None] | None = None
        """Called on all ranks after the last step, before the end of the run is reported."""
        self.before_stop: Callable[[], None] | None = None
        """Called when all ranks have agreed to stop, before saving; it may raise instead."""
        self.reseed = formation.reseed if self.config.fixed_order else None
        """Makes dropout a function of the step and the samples, so that it is equal on any rank and when done again."""
        self.continues = False
        """Whether other ranks of this run have reported its start: the group of ranks changed."""
        self._forward: Forward | None = None
        self._by_labels = False
        self.ending = RunEnding()
        self.state = LoopState(self)
        self.time_limit = TimeLimit(self.config.max_seconds)
        self.time_spent = 0.0
        self.unreported: StepInfo | None = None
        """A step that was taken, and after which not all callbacks were called yet."""
        self._evaluated: tuple[int, dict[str, float]] | None = None

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
        """The number of epochs; None where only max_steps counts."""
        return self.config.epochs or (None if self.config.max_steps is not None else 1)

    @property
    def history(self) -> History:
        """What has been measured so far."""
        return self.report.history

    def request_stop(self, reason: str = "stopped by a callback") -> None:
        """End training after this step; every rank must call this at the same step. `reason`: for the summary."""
        self.ending.early, self.ending.reason = True, self.ending.reason or reason

    def run(self) -> History:
        """Train to the end and return the history."""
        for _ in self.steps():
            pass
        return self.history

    def steps(self) -> Iterator[StepInfo]:
        """Train, yielding after every optimizer step."""
        self.saving.check_directory()
        if (state := self.restore()) is not None:
            self.state.restore(state)
        if self.ending.reported:  # ranks were lost while the result was returned
            self.history.status, self.history.reason = self.ending.status, self.ending.reason
            self.formation.average = None
            self.schedule.put_back(only_scheduled=True)
            return
        count = self.formation.strategy.count_parameters
        parameters = count(self.model), count(self.model, trained=True)
        notes, announce = self.formation.notes, not self.continues
        self.report.started(self.step, self.total_steps, parameters, notes, announce=announce, model=self.model)
        if self._finished() and not self.continues:
            self.ending.reason = "nothing was left to train"
        self.time_limit.begin(self.time_spent)
        self.stop.listen(StopNotices(self.config, self.formation.world, self.stop.ask, self.report.say))
        try:
            self.hooks.fire("on_fit_start", self)
            self.hooks.check_states()
            if self.continues:
                self._complete_boundary()
            while not self._finished():
                yield from self._epoch()
            self._end()
        finally:
            self.checks.close()
            self.stop.silence()

    def _epoch(self) -> Iterator[StepInfo]:
        config, epoch, heartbeat, average = self.config, self.epoch, current_heartbeat(), self.formation.average
        begin_training(self.model, self.formation.unwrap(self.model))
        batches = self._first_batch_seen(iter(self.train_loader))
        while self._forward is not None and not self._finished(within_epoch=True):
            step = self.step + 1
            self.schedule.apply(step - 1)
            due = self.report.is_due(step)
            outcome = train_step(
                self.formation.gradients,
                self.formation.precision,
                self.formation.strategy,
                self.model,
                self.optimizer,
                self._forward,
                batches,
                self.ledger,
                self.formation.clock,
                by_tokens=self._by_labels,
                clip=config.gradient_clipping,
                measure_norm=due,
                reseed=self.reseed,
            )
            if outcome is None:
                break
            heartbeat.beat(step)
            if average is not None:  # before what other ranks take part in: a step is complete, or was not taken
                average.update(step)
            samples = self.formation.gradients.current.global_samples
            self.report.count(samples)
            info = self.unreported = StepInfo(step, epoch, samples, self.schedule.rate, outcome.loss)
            if self.checks.is_on:
                self.checks.after_step(step)
            if due:
                skipped = self.formation.gradients.skipped_steps
                self.report.step_done(info, self._losses(), outcome.grad_norm, skipped)
            if self.hooks.wants_steps:
                self.hooks.after_step(self, info)
            self.unreported = None
            if self.train_loader.is_consumed or self._finished(within_epoch=True):
                batches.close()
                self.train_loader.roll_over()
                self._end_epoch(epoch)
                self._checkpoint_or_stop(step, epochs=epoch + 1)
                yield info
                return
            self._checkpoint_or_stop(step)
            if self.ending.early:  # by max_time: measure and report what was trained of this epoch
                batches.close()
                self._end_epoch(epoch)
            yield info
            if self.checks.rebalance(self.train_loader.sharded, self.report.say):
                batches.close()
                return  # the epoch continues with other shares
        if self.epoch != epoch:  # a stream, whose end is known only when it is reached
            self._end_epoch(epoch)
            if (self.saving.due_after_epoch(epoch + 1) or self.best.is_unsaved(self.step)) and not self._finished():
                self.saves.begin()

    def _complete_boundary(self) -> None:
        """Do what follows the last step, and the ranks were lost in: callbacks, the last evaluation, a checkpoint."""
        if self.unreported is not None:
            self.hooks.after_step(self, self.unreported)
            self.unreported = None
        reported = [record.step for record in self.history.epochs[-1:]] == [self.step]
        closed = reported and "on_epoch_end" not in self.hooks.called
        if self._finished() and self.step and not closed:
            epoch = self.epoch
            self.train_loader.roll_over()
            self._end_epoch(epoch)
        elif self.step and (self.saving.due_after_step(self.step) or self.best.is_unsaved(self.step)):
            self.saves.begin()

    def _first_batch_seen(self, batches: Iterator[Any]) -> Any:
        """Decide on the first batch how the model is called and batches are weighed, then yield all batches."""
        if self._forward is None:
            for first in batches:
                self._forward = decide_forward(self.task.model, self.task.loss_fn, first)
                self._by_labels = self.formation.weighs_labels(self._forward, self.model, first, self.train_loader)
                if not self.continues:
                    self.report.say(self._forward.note)
                self.report.first_batch(self.task.model, first)
                return _chained(first, batches)
        return batches

    def _ranks_synced(self, step: int) -> bool:
        """Whether ranks that are not in lock-step have waited for each other in this step."""
        return step % self.config.log_every_n_steps == 0 or self.formation.strategy.just_synced

    def _checkpoint_or_stop(self, step: int, epochs: int | None = None) -> None:
        """Save at a step's boundary where it is due; `epochs` of them are complete when the step ended one.

        At the run's end `_end` saves.
        """
        if self.formation.is_main and self.time_limit.is_over:
            self.stop.ask(self.time_limit.reason)
        stopping = self.stop.agreed(step)
        if stopping and self.stop.reason == self.time_limit.reason:
            self.request_stop(self.time_limit.reason)
            return
        if stopping and self.before_stop is not None:
            self.before_stop()
        if self.saving.advance(step):
            self.saves.finish()
        due = self.saving.due_after_step(step) or self.best.is_unsaved(step)
        due = due or (epochs is not None and self.saving.due_after_epoch(epochs))
        if stopping or (due and not self._finished()):
            self.saves.begin(may_skip=not stopping)
        if stopping:
            self.saves.finish()
            by_user = self.stop.reason == "SIGINT"
            self._report_end(*_INTERRUPTED if by_user else ("preempted", f"stopped by {self.stop.reason}"))
            raise preempted_error(self.stop.reason, step, self.saving.last_path)

    def _end_epoch(self, epoch: int) -> None:
        """Evaluate and report after a whole epoch, or after the last step."""
        self.losses_checked()
        last = self._finished()
        metrics: dict[str, float] = {}
        every = self.config.eval_every
        if self.val_loader is not None and every and (last or (epoch + 1) % every == 0):
            metrics = self.evaluate(ended_epoch=epoch)
        self._judge("train", {"loss": self.report.epoch_loss})
        self.report.epoch_done(self.step, epoch, self.schedule.rate, metrics)
        self.hooks.fire_once("on_epoch_end", self, epoch, metrics)
        if last or not self.control.is_active:
            return
        with self.formation.clock.paused("idle"):
            goes_on = self.control.should_continue(epoch + 1)
        if not goes_on:
            self.request_stop("stopped by the tuner")
            self.ending.status = "stopped"

    def evaluate(self, *, ended_epoch: int | None = None) -> dict[str, float]:
        """Evaluate on the validation data now; a callback may call this, on all ranks."""
        assert self.val_loader is not None, "only with validation data"
        if ended_epoch is not None and self._evaluated is not None and self._evaluated[0] == self.step:
            metrics = self._evaluated[1]  # a callback has measured these weights
        else:
            metrics = self._measured()
        epoch = self.epoch if ended_epoch is None else ended_epoch
        self.report.evaluated(self.step, epoch, metrics, ends_epoch=ended_epoch is not None)
        return metrics

    def _measured(self) -> dict[str, float]:
        """Evaluate, and decide by the result."""
        limit, task = self.config.limit_val_batches, self.task
        assert self.val_loader is not None
        total = batches_to_measure(self.val_loader, limit)
        with self.report.phase("evaluate", total), self.formation.averaged():
            metrics = evaluate(self.formation, self.model, self.val_loader, task.loss_fn, task.metrics, limit)
        self._evaluated = (self.step, metrics)
        self._judge("val", metrics)
        return metrics

    def _judge(self, split: str, metrics: dict[str, float]) -> None:
        """Decide by what was measured whether this is the best checkpoint, and whether training goes on."""
        values = {f"{split}/{name}": value for name, value in metrics.items()}
        self.best.judge(values, self.step)
        self.best.record(self.history)
        watch = self.stopping
        if watch is not None and watch.judge(values, self.step) is False and watch.since >= self.config.patience:
            times = f"{watch.since} {'epoch' if split == 'train' else 'evaluation'}{'s' * (watch.since > 1)}"
            self.request_stop(f"early stopping, {watch.watched.name} has not improved for {times}")

    def _end(self) -> None:
        self.formation.strategy.consolidate(self.model)
        if self.saving.last_step != self.step or self.best.is_unsaved(self.step):
            self.saves.begin()
        self.saves.finish()
        if self.formation.average is not None:  # the result of the run
            self.formation.average.swap()
            self.formation.average = None
        if self.before_end is not None:
            self.before_end()
        self._report_end(self.ending.status, self.ending.reason)
        self.ending.reported = True
        self.hooks.fire("on_fit_end", self)
        self.schedule.put_back(only_scheduled=True)

    def _report_end(self, status: str, reason: str) -> None:
        self.report.ended(status, self.step, self.saving.last_path, reason)

    def _losses(self) -> Losses:
        """Read the losses since the last reading; a NaN ends the run here unless such steps are skipped."""
        losses = self.ledger.read()
        bad = next((step for step, each in losses.items() if not math.isfinite(each.loss)), None)
        if bad is not None and self.config.on_nonfinite == "stop":
            raise self.failed(f"the loss is {losses[bad].loss} at step {bad}")
        return {step: each for step, each in losses.items() if math.isfinite(each.loss)}

    def failed(self, what: str) -> NonFiniteLossError:
        """Report that the run failed, and return the error to raise."""
        self.saves.finish()  # losses are equal on all ranks, so all are here
        path = self.saving.last_path
        last = f"the last good checkpoint is {path}" if path else "there is no checkpoint before it"
        self._report_end("failed", what)
        hint = "Lower learning_rate, set gradient_clipping, or on_nonfinite='skip'; debug='nan' names the module."
        return NonFiniteLossError(f"{what}; {last}", hint=hint)

    def losses_checked(self) -> None:
        """Read and report the losses so far; a NaN ends the run unless such steps are skipped."""
        self.report.losses(self._losses())

    def _finished(self, *, within_epoch: bool = False) -> bool:
        if self.ending.early or (self.total_steps is not None and self.step >= self.total_steps):
            return True
        return not within_epoch and self.max_epochs is not None and self.epoch >= self.max_epochs

    def count_steps(self) -> int | None:
        """Return the number of optimizer steps of the whole run, where it is known beforehand."""
        config, per_epoch = self.config, self.train_loader.sharded.steps_per_epoch
        if per_epoch is None or self.max_epochs is None:
            return config.max_steps
        # The steps for the samples that are left; a resumed run may be within an epoch.
        sharded, left = self.train_loader.sharded, max(0, self.max_epochs - self.epoch)
        steps = per_epoch * left
        if sharded.samples_done and left:
            unseen = (sharded.num_samples or 0) - sharded.samples_done
            steps = per_epoch * (left - 1) + -(-unseen // self.global_batch)
        return int(min(self.step + steps, config.max_steps or math.inf))


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """Like itertools.chain, but a generator: closing it closes `rest`."""
    yield first
    yield from rest
