"""`phalanx.log`, and the record of a script with its own torch loop, that `phalanx train --script` has started.

Steps are counted by the optimizer that steps first; losses and other values are what the script logs (`phalanx.log`).
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import get_worker_info

from phalanx.errors import UsageError
from phalanx.loop.values import (
    OWN_CURVES,
    Number,
    ValueLog,
    ValueLogger,
    Values,
    as_events,
    checked,
    checked_step,
    loop_under_way,
    reduce_op,
)
from phalanx.observe.events import Event, StepDone
from phalanx.observe.goodput import EVENTS
from phalanx.observe.guard import say_to_user
from phalanx.observe.heartbeat import current as current_heartbeat
from phalanx.observe.sinks import EventStream, FdSink, JsonlSink

_EVERY_STEPS = 10
_LOSSES = ("loss", "train/loss")
"""The names under which scripts log the loss of training."""


class ScriptRecord:
    """Counts steps on every rank, and records them with the logged values on the main one."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: of the run; None: nothing is recorded."""
        self._folder = folder
        self._is_main = os.environ.get("RANK", "0") == "0"
        self._values = ValueLog()
        self._file: EventStream | None = None
        self._launcher = EventStream()
        self._hook: Any = None
        self._optimizer = self._calls = 0
        self._rate = 0.0
        self._board = current_heartbeat()
        self._reported = (0, time.perf_counter())
        self._has_warned = False
        self.steps = 0

    def count_steps(self) -> None:
        """Count the steps of the optimizer that steps first, from now on."""
        self._hook = register_optimizer_step_post_hook(self._after_step)
        if self._is_main:
            atexit.register(self._report)

    def stop(self) -> None:
        """Count no more steps."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def continue_at(self, step: int) -> None:
        """Let values that follow be those of this step: where a loop of Phalanx has ended, which counted them."""
        self.steps, self._reported = step, (step, time.perf_counter())

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer = self._optimizer or id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        self.steps += 1
        self._board.beat(self.steps)
        if self._is_main and self.steps % _EVERY_STEPS == 0:
            self._rate = float(optimizer.param_groups[0]["lr"])
            self._report()

    def log(self, values: Values, value: Any = None, *, step: int | None = None, reduce: str | None = None) -> None:
        """Keep values until the next report; without an optimizer's steps, each call is one."""
        numbers = checked(values, value, reserved=OWN_CURVES.difference(_LOSSES))
        at = None if step is None else checked_step(step)
        if reduce is not None:
            numbers = _over_ranks(numbers, reduce)
        if not self._is_main:
            return
        if self._folder is None:
            if not self._has_warned:
                self._has_warned = True
                say_to_user("log: nothing is recorded. Start the script with: phalanx train --script")
            return
        self._calls += 1
        self._values.add(self.steps or self._calls if at is None else at, numbers)
        if not self.steps and self._calls % _EVERY_STEPS == 0:
            self._report()

    def _report(self) -> None:
        """Write the steps and values since the last report."""
        (before, began), now = self._reported, time.perf_counter()
        since = self.steps - before
        if not since and not self._values:
            return
        self._reported = (self.steps, now)
        loss = None
        for point, values in self._values.read(since):
            loss = next((values[name] for name in _LOSSES if name in values), loss)
            for event in as_events(point, 0, values):
                self._write(event, console=True)
        if since:
            seconds = (now - began) / since
            done = StepDone(self.steps, epoch=0, loss=loss, learning_rate=self._rate, step_seconds=seconds)
            self._write(done, console=loss is not None)

    def _write(self, event: Event, *, console: bool) -> None:
        assert self._folder is not None, "asked before"
        if self._file is None:
            self._file = EventStream([JsonlSink(self._folder / EVENTS)])
            if (launcher := FdSink.from_environment()) is not None:
                self._launcher.add(launcher)
        self._file.emit(event)
        if console:
            self._launcher.emit(event)


def _over_ranks(values: Mapping[str, Number], op: str) -> dict[str, Number]:
    """Return values over all ranks of the script's own process group, if it has one."""
    operation = reduce_op(op)
    if not values or not dist.is_initialized():
        return dict(values)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    numbers = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values.values()])
    dist.all_reduce(numbers, op=operation)
    return dict(zip(values, (numbers / dist.get_world_size() if op == "mean" else numbers).unbind(), strict=True))


@functools.cache
def script_record() -> ScriptRecord:
    """Return the record of this process's script."""
    folder = os.environ.get("PHALANX_RUN_DIR")
    return ScriptRecord(None if folder is None else Path(folder))


def count_steps() -> None:
    """Count the steps of the script that this rank is about to run."""
    if "PHALANX_RUN_DIR" in os.environ:
        script_record().count_steps()


def continue_at(step: int) -> None:
    """Let values that the script logs from now on be those of the last step of a loop of Phalanx, if it took any."""
    if step:
        script_record().continue_at(step)


def stop_counting() -> None:
    """Leave counting to the loop of Phalanx that the script has begun."""
    script_record().stop()


def log(values: Values, value: Any = None, *, step: int | None = None, reduce: str | None = None) -> None:
    """Log your own numbers: `log({"critic": loss})` or `log("critic", loss)`.

    They go to the running loop: a trainer's, a `Formation`'s, or the script that `phalanx train --script` started.
    `step`: the loop's own by default. `reduce`: "mean", "sum", "min" or "max" over the ranks, all of which then call
    this; by default the main rank's numbers count.
    """
    if get_worker_info() is not None:
        raise UsageError(
            "log was called in a worker process of a DataLoader, from which no number reaches the run",
            hint="Return the number with the sample and log it in the loop, or set num_workers=0.",
        )
    loop: ValueLogger = loop_under_way() or script_record()
    loop.log(values, value, step=step, reduce=reduce)
