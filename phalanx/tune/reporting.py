"""What a function or script of the user's own says from inside a trial."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import EXIT_PREEMPTED, UsageError
from phalanx.observe.control import TrialControl
from phalanx.observe.events import MetricsReported
from phalanx.observe.sinks import FdSink, JsonlSink
from phalanx.tune.trial import REPORTED
from phalanx.world.env import read_rank_env

GOES_ON_AFTER = "PHALANX_TRIAL_GOES_ON_AFTER"
"""The environment variable that says after which iteration a trial goes on from what it had saved."""


class TrialStopped(SystemExit):
    """Raised in a trial that is told to end; no `except Exception` of the user's holds it up."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class _Reporter:
    """This process's line to whoever watches the trial."""

    def __init__(self) -> None:
        env = read_rank_env()
        self._is_main = env is None or env.rank == 0
        folder = os.environ.get("PHALANX_RUN_DIR")
        self._events = None if folder is None else JsonlSink(Path(folder) / "events.jsonl")
        self._bell = FdSink.from_environment()
        self._gate = TrialControl.from_environment()
        self.iteration = int(os.environ.get(GOES_ON_AFTER, "0"))
        if self._gate is not None:
            self._gate.start_after(self.iteration)

    def send(self, iteration: int, values: dict[str, float]) -> None:
        """Write the values down, and wait at the gate where that is asked for."""
        self.iteration = iteration
        event = MetricsReported(iteration, iteration, REPORTED, values, rank=0)
        if self._is_main and self._events is not None:
            self._events.handle(event)
            if self._bell is not None:
                self._bell.handle(event)
        if self._gate is not None and self._gate.is_due(iteration) and not self._gate.wait(iteration):
            raise TrialStopped


_reporter: _Reporter | None = None


def report(metrics: Mapping[str, float] | None = None, *, step: int | None = None, **more: float) -> None:
    """Report what a trial has measured: `report(loss=0.3)`, `report({"val/loss": 0.3}, step=4)`.

    `step` says how far the trial is, from 1. By default every call is one further; a trial that is started again counts
    on from its last report where it had saved something in `checkpoint_dir()`, else from 1. All ranks of a trial call
    it, the first one's values count. It does not return when the trial is given up. Outside of a trial it does nothing.
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
    """Return the folder in which this trial keeps what it needs to go on; trainers of ours use it by themselves.

    A trial that is started again, or takes over another's state, finds there what was saved.
    """
    given = os.environ.get("PHALANX_CHECKPOINT_DIR")
    if given is None:
        raise UsageError("checkpoint_dir() is for trials: no trial runs here", hint="Start it with phalanx tune.")
    path = Path(given)
    path.mkdir(parents=True, exist_ok=True)
    return path
