"""Reports from inside a trial, for functions and scripts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import EXIT_PREEMPTED, UsageError
from phalanx.observe.control import TrialControl
from phalanx.observe.events import MetricsReported
from phalanx.observe.sinks import FdSink, JsonlSink
from phalanx.tools.tune.trial import REPORTED
from phalanx.world.env import read_rank_env

RESUMES_AFTER = "PHALANX_TRIAL_RESUMES_AFTER"
"""The environment variable with the iteration after which a trial resumes from what it had saved."""


class TrialStopped(SystemExit):
    """Raised in a trial that must end; it passes every `except Exception`."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class _Reporter:
    """Sends this process's reports to the search."""

    def __init__(self) -> None:
        env = read_rank_env()
        self._is_main = env is None or env.rank == 0
        folder = os.environ.get("PHALANX_RUN_DIR")
        self._events = None if folder is None else JsonlSink(Path(folder) / "events.jsonl")
        self._launcher = FdSink.from_environment()
        self._control = TrialControl.from_environment()
        self.iteration = int(os.environ.get(RESUMES_AFTER, "0"))
        if self._control is not None:
            self._control.start_after(self.iteration)

    def send(self, iteration: int, values: dict[str, float]) -> None:
        """Write the values, and wait for a verdict where one is due."""
        self.iteration = iteration
        event = MetricsReported(iteration, iteration, REPORTED, values, rank=0)
        if self._is_main and self._events is not None:
            self._events.handle(event)
            if self._launcher is not None:
                self._launcher.handle(event)
        if self._control is not None and self._control.is_due(iteration) and not self._control.wait(iteration):
            raise TrialStopped


_reporter: _Reporter | None = None


def report(metrics: Mapping[str, float] | None = None, *, step: int | None = None, **more: float) -> None:
    """Report what a trial has measured: `report(loss=0.3)`, `report({"val/loss": 0.3}, step=4)`.

    `step`: the iteration, from 1. By default every call is the next one; a restarted trial continues from its last
    report where it had saved something in `checkpoint_dir()`, else from 1. All ranks of a trial call it; rank 0's
    values count. It does not return when the trial is stopped. Outside of a trial it does nothing.
    """
    global _reporter
    if _reporter is None:
        _reporter = _Reporter()
    iteration = _reporter.iteration + 1 if step is None else step
    if iteration < 1:
        raise UsageError(f"report(step={step}): steps count from 1")
    _reporter.send(iteration, {name: as_number(name, value) for name, value in {**(metrics or {}), **more}.items()})


def as_number(name: str, value: Any) -> float:
    """Return a metric as a plain number; a tensor of one element is one."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"the metric '{name}' is {value!r}, not a number") from None


def checkpoint_dir() -> Path:
    """Return the folder for the checkpoints of this trial; the trainers use it without being asked.

    A trial that is started again, or continues another's state, finds there what was saved.
    """
    given = os.environ.get("PHALANX_CHECKPOINT_DIR")
    if given is None:
        raise UsageError("checkpoint_dir() is for trials: no trial runs here", hint="Start it with phalanx tune.")
    path = Path(given)
    path.mkdir(parents=True, exist_ok=True)
    return path
