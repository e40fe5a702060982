"""What the loop reports: events for the sinks (main rank only) and the history that `fit` returns."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.checkpoint import SavedCheckpoint
from phalanx.config import DistributedConfig
from phalanx.data.order import BatchSplit
from phalanx.loop.gauges import RankGauges, RunSpeed, token_rate
from phalanx.loop.loss_log import Losses, LossLog, LossSum
from phalanx.loop.recorders import tensorboard_dir
from phalanx.loop.step_info import StepInfo
from phalanx.loop.values import OWN_CURVES, ValueLog, Values, as_events, checked, reduced
from phalanx.model import recorded_dimensions
from phalanx.observe.events import (
    LOGGED,
    CheckpointSaved,
    EpochDone,
    Message,
    MetricsReported,
    Phase,
    Recovered,
    RunEnded,
    RunStarted,
    StepDone,
)
from phalanx.observe.format import speed_note
from phalanx.observe.heartbeat import current as current_heartbeat
from phalanx.observe.heartbeat import within
from phalanx.observe.history import EpochRecord, History
from phalanx.observe.sinks import EventStream
from phalanx.world.mesh import layout_words
from phalanx.world.world import World

if TYPE_CHECKING:
    from phalanx.loop.formation_state import FormationState

_STEPS_IN_CHECKPOINT = 1000
_EARLY_STEPS = (2, 3, 5, 8)
_UNREAD_STEPS = 50
"""Losses are read at least every this many steps, however seldom they are reported."""


class Reporter:
    """Turns what happens in the loop into events and history."""

    def __init__(
        self, formation: FormationState, name: str, layout: BatchSplit, run_dir: Path, events: EventStream
    ) -> None:
        """`name`: of the run; `layout`: of its training batches."""
        self._formation, self._config, self._world = formation, formation.config, formation.world
        self._name, self._layout, self._run_dir = name, layout, run_dir
        self.events = events
        self.loss_log = LossLog(self._world)
        self._values = ValueLog()
        self._read_at = 0
        self.clock = formation.clock
        self._speed = RunSpeed(formation, run_dir, events.emit)
        self._every = self._config.log_every_n_steps
        self.history = History()
        self._began = time.monotonic()
        self._time_before = 0.0
        self._first_step = 0
        self._total_steps: int | None = None
        self.samples = self._epoch_samples = 0
        self._epoch_began = time.monotonic()
        self._losses_of = {"epoch": LossSum(), "report": LossSum()}
        """The losses of the epoch so far, and of the steps since the last report."""
        self._notices: set[str] = set()
        self.next_commands: list[str] = []
        """What the summary of the run proposes to run next."""
        self._gauges = RankGauges(self._world, self.clock, events.emit if self._world.is_main else None)
        self._resumed_from: str | None = None
        self._announced = False

    def resumed(self, state: dict[str, Any], *, same_run: bool) -> None:
        """Continue the history of the resumed run; `same_run`: with other ranks, so that its start may be reported."""
        self._announced = same_run and state["announced"]
        self.history = History.from_dict(state.get("history", {}))
        self.history.status, self.history.reason = "running", ""
        self._time_before = self.history.total_time
        self.samples = state.get("samples", 0)  # a checkpoint of a loop written by the user has none of these
        self._losses_of |= {name: LossSum(**values) for name, values in state.get("losses", {}).items()}
        self._resumed_from = state["path"]

    def started(self, step: int, total_steps: int | None, model: nn.Module, *, epochs: int | None = None) -> None:
        """Report the run's start, unless ranks that were lost since have done so: what runs where, how large a step is.

        `step`: steps taken before. `epochs`: of the whole run, if that is known.
        """
        self._first_step = self._read_at = step
        self._total_steps = total_steps
        count = self._formation.strategy.count_parameters  # all ranks call it
        parameters = count(model), count(model, trained=True)
        self._speed.begin(step, self.samples)
        self._began = self._epoch_began = time.monotonic()
        if self._announced:
            return
        self.events.emit(self._run_started(model, epochs, *parameters))
        self._speed.report(self.samples)
        self.say(self._config.unused_note, "warning")
        for note in self._formation.notes:
            self.say(note)
        if total_steps is not None and step >= total_steps:
            reason = f"the checkpoint is at step {step}, and the run ends at step {total_steps}"
            self.say(f"nothing is left to train: {reason}. Raise epochs or max_steps to go on.", "warning")

    def _run_started(self, model: nn.Module, epochs: int | None, parameters: int, trained: int) -> RunStarted:
        config, world, strategy = self._config, self._world, self._formation.strategy
        note = speed_note(world.ranks_per_gpu)
        folder = None if config.fast_dev_run else self._run_dir  # it is removed at the end
        return RunStarted(
            name=self._name,
            run_dir=str(folder or ""),
            world_size=world.world_size,
            device=world.device.type,
            strategy=strategy.name,
            precision=self._formation.precision.name,
            parameters=parameters,
            batch_size=self._layout.batch_size,
            accumulation=config.gradient_accumulation_steps,
            global_batch=self._layout.global_batch,
            total_steps=self._total_steps,
            epochs=epochs,
            resumed_from=self._resumed_from,
            mesh={axis: size for axis, size in world.mesh.sizes.items() if size > 1},
            first_step=self._first_step,
            tensorboard_dir=tensorboard_dir(config, self._run_dir),
            log_dir=str(folder / "logs") if folder else "",
            trained_parameters=trained,
            layout=layout_words(strategy.name, config, world.mesh.sizes) + (f" ({note})" if note else ""),
            ranks_per_gpu=world.ranks_per_gpu,
            job=_job(model, config, world),
            run_id=self._formation.run_id,
        )

    def recovered(self, event: Recovered) -> None:
        """Report that the group of ranks changed in place."""
        self.events.emit(event)
        self._speed.report(self.samples)

    def interrupted(self) -> None:
        """Report where the time went until the group of ranks changed."""
        if self.samples:
            self._speed.report(self.samples)

    def first_batch(self, model: nn.Module, batch: Any) -> None:
        """Find from the first batch how many tokens a sample has."""
        self._speed.tokens = token_rate(model, batch, self._world, self._formation.precision.name)

    def to_keep(self) -> dict[str, Any]:
        """Return the checkpoint's part of this: the history with the latest steps (events.jsonl has all of them)."""
        self._update_totals()
        steps, logged = (records[-_STEPS_IN_CHECKPOINT:] for records in (self.history.steps, self.history.logged))
        latest = dataclasses.replace(self.history, steps=steps, logged=logged)
        history = latest.to_dict()  # not of all steps: sharded runs keep their state every few of them
        losses = {name: dataclasses.asdict(losses) for name, losses in self._losses_of.items()}
        # After a step all ranks know that the main one has reported the start.
        announced = self._announced or self._formation.step > self._first_step
        return {"history": history, "samples": self.samples, "losses": losses, "announced": announced}

    def say(self, text: str, level: str = "info") -> None:
        """Show a message to the user, once."""
        if text and text not in self._notices:
            self._notices.add(text)
            self.events.emit(Message(level, text))

    def is_due(self, step: int) -> bool:
        """Whether losses are read after this step: the first, every n-th, and the last."""
        return step % self._every == 0 or step == self._first_step + 1 or step == self._total_steps

    def looks_at_losses(self, step: int) -> bool:
        """Whether losses are read between two reports: a NaN is then found soon, mostly in one of the first steps."""
        return step - self._first_step in _EARLY_STEPS or step % _UNREAD_STEPS == 0

    def count(self, samples: int) -> None:
        """Count a step's samples."""
        seconds = self.clock.step_done(samples)
        self._gauges.after_step(seconds)
        if self.clock.steps == 1:
            if self._world.device.type == "cuda":  # else the first step's work would count in the next one
                torch.cuda.synchronize(self._world.device)
            self.clock.warmed_up()
        self._speed.step_done()
        self.samples += samples
        self._epoch_samples += samples
        if self._speed.ledger.is_due:
            self._speed.report(self.samples)

    def losses(self, losses: Losses) -> None:
        """Add losses to the means of the epoch and of the next report."""
        for sum_of in self._losses_of.values():
            sum_of.add(losses)

    @property
    def epoch_loss(self) -> float:
        """The mean training loss of the epoch so far."""
        mean = self._losses_of["epoch"].mean
        return float("nan") if mean is None else mean

    def log(self, step: int, values: Values, value: Any = None, reduce: str | None = None) -> None:
        """Keep values that the user logged until `report_logged`; all ranks call this if they are reduced."""
        numbers = checked(values, value, reserved=OWN_CURVES)
        if reduce is not None:
            numbers = reduced(numbers, reduce, self._formation)
        if self._world.is_main:
            self._values.add(step, numbers)

    def report_logged(self, step: int, epoch: int, *, ends_epoch: bool = False) -> dict[str, float]:
        """Report the values that were logged since the last time; return the last of each name.

        `epoch`: counts from 1, or 0 if the loop has none. `ends_epoch`: the values of the validation data that were
        logged after the last step are those of an `EpochDone` that follows.
        """
        since, self._read_at = step - self._read_at, step
        latest: dict[str, float] = {}
        for point, values in self._values.read(since):
            latest |= values
            for event in as_events(point, epoch, values, ends_epoch=ends_epoch and point == step):
                self.events.emit(event)
                if event.split == LOGGED:
                    self.history.logged.append({"step": point, "values": event.values})
                elif not event.ends_epoch:
                    self.history.evaluations.append({"step": point, "epoch": epoch, "val": event.values})
        return latest

    def report_last_logged(self, step: int) -> None:
        """Report what was logged up to this step before an error ends the loop; does not wait for a device."""
        self._values.keep_complete(step)
        self.report_logged(step, self._epoch)

    @property
    def _epoch(self) -> int:
        """The epoch in progress, from 1; between two, the last one."""
        return len(self.history.epochs) + (self._epoch_samples > 0)

    @property
    def logged_names(self) -> set[str]:
        """The names of all values that were logged so far; on the main rank."""
        return self._values.names

    def step_done(self, info: StepInfo, losses: Losses, grad_norm: torch.Tensor | None, skipped: int) -> None:
        """Report a logging step; `skipped`: steps so far whose gradient was not finite."""
        self.losses(losses)
        mean, self._losses_of["report"] = self._losses_of["report"].mean, LossSum()
        if mean is None:
            return
        rate, seconds = self.clock.lap()
        event = StepDone(
            step=info.step,
            epoch=info.epoch + 1,
            loss=mean,
            learning_rate=info.learning_rate,
            grad_norm=None if grad_norm is None else float(grad_norm),
            samples_per_second=rate,
            step_seconds=seconds,
            memory_bytes=self._gauges.memory.bytes(),
            samples=self.samples,
            tokens_per_second=self._speed.tokens.tokens(rate),
            mfu=self._speed.tokens.mfu(rate),
            speedup=self._speed.speedup(rate),
            gpu_utilization=self._gauges.gpu.utilization,
            rank=self.events.rank,  # else the stream would copy the event
        )
        self.history.steps.append(
            {key: value for key, value in event.to_dict().items() if key not in {"event", "time", "rank"}}
        )
        self.events.emit(event)
        if skipped:
            self.say(f"{skipped} step{'s' * (skipped > 1)} skipped so far: the gradient was not finite", "warning")

    def evaluated(self, step: int, epoch: int, values: dict[str, float], *, ends_epoch: bool) -> None:
        """Report what was measured on the validation data, at the end of an epoch or within one."""
        if not ends_epoch:
            self.history.evaluations.append({"step": step, "epoch": epoch + 1, "val": values})
        self.events.emit(MetricsReported(step, epoch + 1, "val", values, ends_epoch))

    def epoch_done(
        self, step: int, epoch: int, learning_rate: float, metrics: dict[str, float], *, whole: bool = True
    ) -> None:
        """Close an epoch's record, once: where ranks were lost at its end, the remaining ones call this again.

        `whole`: False if the run ends within the epoch; one that is resumed replaces the record at its end.
        """
        last = self.history.epochs[-1] if self.history.epochs else None
        if last is not None and (last.epoch, last.step) == (epoch + 1, step):
            return
        if last is not None and last.epoch == epoch + 1:
            self.history.epochs.pop()
        seconds = time.monotonic() - self._epoch_began
        loss = self.epoch_loss
        speed = self._epoch_samples / seconds if seconds else 0.0
        self.history.epochs.append(EpochRecord(epoch + 1, step, loss, metrics, learning_rate, seconds, speed))
        self.events.emit(MetricsReported(step, epoch + 1, "train", {"loss": loss}, ends_epoch=True))
        self.events.emit(EpochDone(step, epoch + 1, loss, metrics, seconds, speed))
        if whole:
            self._losses_of["epoch"], self._epoch_samples = LossSum(), 0
            self._epoch_began = time.monotonic()
        self._update_totals()

    def checkpointed(self, saved: SavedCheckpoint, *, best: bool) -> None:
        """Report a published checkpoint."""
        self.history.checkpoint = str(saved.path)
        self.history.checkpoint_stall += saved.stall
        self.events.emit(
            CheckpointSaved(saved.step, str(saved.path), saved.seconds, saved.bytes, best, saved.stall, saved.written)
        )
        for note in saved.notes:
            self.say(note, "warning")

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        """Time something that is not training, outside the throughput; `total`: its batches, where it has some."""
        began = time.monotonic()
        self.events.emit(Phase(name, "begin", total=total))
        self._update_totals()
        with self.clock.paused(name), within("a save", current_heartbeat()) if name == "checkpoint" else nullcontext():
            yield
        self.events.emit(Phase(name, "end", time.monotonic() - began))

    def ended(self, status: str, reason: str, step: int, checkpoint: str | None) -> None:
        """Close the run's record and show what can be done next."""
        self.report_logged(step, self._epoch)
        self.history.status, self.history.reason = status, reason
        self._update_totals()
        self._gauges.end()
        self._speed.close(self.samples, self.history)
        good = status in ("finished", "stopped")
        if good:
            event = self._formation.strategy.closing_event() if self._world.is_main else None
            if event is not None:
                self.events.emit(event)
        commands = _what_follows(self._config, self._run_dir, checkpoint) if good else []
        best = {"accuracy": self.history.best_accuracy, "loss": self.history.best_loss}
        same = {field.name for field in dataclasses.fields(RunEnded)} & vars(self.history).keys()
        fields = {
            "step": step,
            "best": {name: value for name, value in best.items() if value is not None},
            "checkpoint": checkpoint,
            "next_commands": [*self.next_commands, *commands, *self.events.next_commands],
        }
        self.events.emit(RunEnded(**{**{name: getattr(self.history, name) for name in same}, **fields}))

    def _update_totals(self) -> None:
        self.history.total_time = self._time_before + time.monotonic() - self._began
        self._speed.write_to(self.history)


def _job(model: object, config: DistributedConfig, world: World) -> dict[str, Any]:
    """Return what the planner must know of this run; empty where ranks share a GPU, which says nothing of speed."""
    device, dimensions = world.device, recorded_dimensions(model)
    if not dimensions or world.ranks_per_gpu > 1:
        return {}
    gpu, memory = "", 0.0
    if device.type == "cuda":
        gpu, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    return {"model": dimensions, "settings": config.given(), "gpu": gpu, "gpu_memory_gib": memory / 2**30}


def _what_follows(config: DistributedConfig, run_dir: Path, checkpoint: str | None) -> list[str]:
    """Return what can be done with a good run: its model is known to other commands where a recipe was trained."""
    name = shlex.quote(run_dir.name if run_dir.parent.absolute() == Path("runs").absolute() else str(run_dir))
    commands: list[str] = []
    if config.fast_dev_run:  # the folder goes
        return commands
    with suppress(OSError, ValueError):  # a trainer in Python may have no folder
        record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
        usable = checkpoint is not None and record.get("recipe")
        commands = [f"phalanx {verb} {name}" for verb in ("evaluate", "export") if usable] + ["phalanx ui"]
    folder, board = tensorboard_dir(config, run_dir), _command("tensorboard")
    return [*commands, f"{board} --logdir {folder}"] if folder and board else commands


def _command(name: str) -> str | None:
    """Return how to call a program: by its name where the shell finds it, else by its path; None: not installed."""
    path = Path(sys.executable).parent / name
    near = path if (relative := os.path.relpath(path)).startswith("..") else relative
    return name if shutil.which(name) else str(near) if path.exists() else None
