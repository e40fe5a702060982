"""Keras callbacks: events and history, stop/continue control for tuning, and preemption."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import tensorflow as tf
import torch.distributed as dist

from phalanx.config import DistributedConfig
from phalanx.engines.tensorflow.backup import OwnBackup, first_epoch, size_of
from phalanx.errors import PreemptedError
from phalanx.loop.tuning_trial import EpochControl
from phalanx.observe.events import CheckpointSaved, EpochDone, Message, MetricsReported, RunEnded, RunStarted, StepDone
from phalanx.observe.history import EpochRecord, History
from phalanx.observe.sinks import EventStream
from phalanx.observe.step_clock import StepClock
from phalanx.world.env import read_rank_env, stop_signals


class KerasReport:
    """Reports what happens in Keras, on every rank; the event stream of ranks that do not lead has no sinks."""

    def __init__(self, config: DistributedConfig, events: EventStream, started: RunStarted, steps: int) -> None:
        self._config = config
        self._events = events
        self._started = started
        self.history = History()
        self._clock = StepClock()
        self._began = self._epoch_began = time.monotonic()
        self._step = started.first_step
        self._epoch = 0
        self._mean = (0, 0.0)
        self._batches, self._steps_per_epoch = 0, steps
        self._evaluating = contextlib.ExitStack()
        self.backup: str | None = None
        self.status = "finished"

    @property
    def epoch_is_whole(self) -> bool:
        """Whether the epoch has had all its steps: one that max_steps cut short is not done, and not backed up."""
        return self._batches >= self._steps_per_epoch

    @property
    def step(self) -> int:
        """Steps taken, over all resumptions."""
        return self._step

    def say(self, text: str, level: str = "info") -> None:
        """Show a message to the user."""
        self._events.emit(Message(level, text))

    def begin(self) -> None:
        """Report the start of the run."""
        self._began = time.monotonic()
        self._events.emit(self._started)

    def begin_epoch(self, epoch: int) -> None:
        """Note that an epoch begins."""
        self._epoch, self._mean, self._batches = epoch, (0, 0.0), 0
        self._epoch_began = time.monotonic()
        self._clock.lap()

    def end_step(self, batch: int, loss: Callable[[], float], rate: Callable[[], float]) -> None:
        """Count a step; read its loss, which waits for the device, only where it is logged."""
        self._step += 1
        self._batches += 1
        self._clock.step_done(self._started.global_batch)
        if self._step % self._config.log_every_n_steps and self._step != self._started.first_step + 1:
            return
        samples, seconds = self._clock.lap()
        event = StepDone(
            step=self._step,
            epoch=self._epoch + 1,
            loss=self._loss_since_last(batch + 1, loss()),
            learning_rate=rate(),
            samples_per_second=samples,
            step_seconds=seconds,
            memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            samples=self._step * self._started.global_batch,
        )
        self.history.steps.append(
            {key: value for key, value in event.to_dict().items() if key not in {"event", "time", "rank"}}
        )
        self._events.emit(event)

    def _loss_since_last(self, batches: int, mean: float) -> float:
        """Keras keeps the mean since the epoch began: return that of the batches since it was last read."""
        before, earlier = self._mean
        self._mean = (batches, mean)
        return mean if batches <= before else (mean * batches - earlier * before) / (batches - before)

    def begin_evaluation(self) -> None:
        """Pause the throughput."""
        self._evaluating.enter_context(self._clock.paused("evaluate"))

    def end_evaluation(self) -> None:
        """Resume the throughput."""
        self._evaluating.close()

    def end_epoch(self, epoch: int, logs: Mapping[str, Any], rate: float) -> None:
        """Close an epoch's record with Keras' means."""
        values = {name: float(value) for name, value in logs.items() if hasattr(value, "__float__")}
        val = {name.removeprefix("val_"): value for name, value in values.items() if name.startswith("val_")}
        train = {name: value for name, value in values.items() if not name.startswith("val_") and name != "lr"}
        seconds = time.monotonic() - self._epoch_began
        loss = train.get("loss", float("nan"))
        speed = self._clock.average
        self.history.epochs.append(EpochRecord(epoch + 1, self._step, loss, val, rate, seconds, speed))
        if val:
            self._events.emit(MetricsReported(self._step, epoch + 1, "val", val, ends_epoch=True))
        self._events.emit(MetricsReported(self._step, epoch + 1, "train", train, ends_epoch=True))
        self._events.emit(EpochDone(self._step, epoch + 1, loss, val, seconds, speed))
        self._update()

    def saved(self, path: str, size: int, seconds: float) -> None:
        """Report a backup."""
        self.backup = self.history.checkpoint = path
        self._events.emit(CheckpointSaved(self._step, path, seconds, size))

    def end(self, status: str | None = None) -> None:
        """Close the run's record; without a status it is finished, or stopped by trial control."""
        status = status or self.status
        self.history.status = status
        self._update()
        best = {"accuracy": self.history.best_accuracy, "loss": self.history.best_loss}
        self._events.emit(
            RunEnded(
                status=status,
                step=self._step,
                total_time=self.history.total_time,
                throughput=self.history.throughput,
                best={name: value for name, value in best.items() if value is not None},
                checkpoint=self.backup,
            )
        )

    def _update(self) -> None:
        self.history.total_time = time.monotonic() - self._began
        self.history.throughput = self._clock.average


def report_callback(keras: Any, report: KerasReport, max_steps: int | None) -> Any:
    """Return the report as a callback of the Keras that trains: each Keras has its own base class."""

    class Report(keras.callbacks.Callback):  # type: ignore[misc]
        _supports_tf_logs = True  # else Keras 2 copies every step's logs to the host

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            report.begin_epoch(epoch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            report.end_step(batch, lambda: epoch_loss(self.model), lambda: rate_of(self.model))
            if max_steps is not None and report.step >= max_steps:
                self.model.stop_training = True

        def on_test_begin(self, logs: Any = None) -> None:
            report.begin_evaluation()

        def on_test_end(self, logs: Any = None) -> None:
            report.end_evaluation()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            report.end_epoch(epoch, logs or {}, rate_of(self.model))

    return Report()


def epoch_loss(model: Any) -> float:
    """Return the mean loss of the epoch so far; all workers must call this at the same steps.

    Keras 2's callbacks do not get it: there the losses of several workers are added up.
    """
    return float(model.get_metrics_result()["loss"])


def rate_of(model: Any) -> float:
    """Return the current learning rate."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    rate = optimizer.learning_rate
    if callable(rate) and not hasattr(rate, "assign"):  # Keras 2 shows a schedule itself
        rate = rate(optimizer.iterations)
    return float(tf.convert_to_tensor(rate).numpy())


_fits = itertools.count()
_OWNER = "trial"
"""A file in a backup's folder that names the trial whose backup it is."""


def open_control(store: dist.Store | None, *, leads: bool, done: int) -> EpochControl | None:
    """Return the trial control of this run, which has done `done` epochs; None outside of a trial."""
    fit = next(_fits)
    if store is not None:
        store = dist.PrefixStore(f"fit-{fit}", store)  # a script may fit again in the same processes
    control = EpochControl(store, asks=leads)
    control.start_after(done)
    return control if control.is_active else None


def control_callback(keras: Any, control: EpochControl, report: KerasReport) -> Any:
    """Return trial control as a callback; it comes before the backup, which saves the epoch after which a run stops."""

    class Control(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            last = epoch + 1 == self.params["epochs"] or self.model.stop_training
            if not last and not control.should_continue(epoch + 1):
                self.model.stop_training = True
                report.status = "stopped"

    return Control()


def backup_callback(keras: Any, directory: Path, every: int, report: KerasReport, own_backup: OwnBackup | None) -> Any:
    """Return the backup of every n-th epoch as a callback: Keras' BackupAndRestore, or one by `own_backup`."""

    class RestoreAndSave(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            assert own_backup is not None, "else it is not used"
            own_backup.restore()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert own_backup is not None, "else it is not used"
            own_backup.save(epoch)

    base = keras.callbacks.BackupAndRestore if own_backup is None else RestoreAndSave

    class Backup(base):  # type: ignore[misc, valid-type]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            last = epoch + 1 == self.params.get("epochs") or self.model.stop_training
            if not report.epoch_is_whole or ((epoch + 1) % every and not last):
                return
            began = time.monotonic()
            super().on_epoch_end(epoch, logs)
            report.saved(str(directory), size_of(directory), time.monotonic() - began)

    if own_backup is not None:
        return Backup()
    # Keras 3 overwrites its file in place: after a kill during that, the one before must be there.
    options = {} if keras.__name__ == "tf_keras" else {"double_checkpoint": True}
    return Backup(str(directory), delete_checkpoint=False, **options)


def rate_keeper(keras: Any, model: Any, directory: Path, *, leads: bool) -> Any:
    """Return a callback, placed after the backup's, by which a trial that continues another's keeps its own rate.

    Backups hold the rate among the optimizer's variables. In a trial's own backup callbacks may have changed it. A
    schedule is not a variable, and stays as it was compiled.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    compiled = optimizer.learning_rate
    rate = float(compiled.numpy()) if hasattr(compiled, "assign") else None
    note, trial = directory / _OWNER, os.environ.get("PHALANX_TRIAL", "")
    same_trial = note.exists() and note.read_text(encoding="ascii") == trial

    class KeepRate(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            if rate is not None and not same_trial:
                optimizer.learning_rate = rate

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if leads and first_epoch(directory) == epoch + 1:  # not before: a kill may leave the other's backup
                note.write_text(trial, encoding="ascii")

    return KeepRate()


@contextmanager
def stopping(report: KerasReport) -> Iterator[None]:
    """Raise an exception when a signal asks to stop; workers have no step boundary at which they could agree."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        last_backup = f"the last backup is {report.backup}" if report.backup else "there is no backup yet"
        raise PreemptedError(
            f"stopped by {name} after step {report.step}: {last_backup}",
            hint=f"To resume from it, run it again with resume_from_checkpoint={report.backup!r}."
            if report.backup
            else "Set checkpoint_dir or checkpoint_frequency to keep the progress of a run that is stopped.",
        )

    before = {number: signal.signal(number, stop) for number in stop_signals(read_rank_env())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
