"""One trial: its point, folder, reports and state; the metric that is compared; reports from inside a trial."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from phalanx.errors import EXIT_PREEMPTED, UsageError, nearest
from phalanx.observe.events import LOGGED, EpochDone, MetricsReported, RunEnded, StepDone, from_json
from phalanx.observe.sinks import FdSink, JsonlSink
from phalanx.observe.trial_control import TrialControl
from phalanx.world.env import read_rank_env

_MORE_IS_BETTER = ("accuracy", "acc", "auc", "f1", "score", "reward", "bleu", "precision", "recall")
_LESS_IS_BETTER = ("loss", "error", "mse", "mae", "rmse", "perplexity", "ppl", "seconds", "time")


DEFAULT_METRIC = "loss"


@dataclass
class Objective:
    """The metric that is compared; `mode` is "min" or "max"."""

    metric: str
    mode: str
    is_open: bool = False
    """Whether the metric was not named: then it is the only one that a function returns."""

    @classmethod
    def of(cls, metric: str | None, mode: str | None = None) -> Objective:
        """Return the objective; for a well-known metric the mode may be left out."""
        is_open, metric = metric is None, metric or DEFAULT_METRIC
        if mode is None:
            words = metric.lower().replace("/", " ").replace("_", " ").split()
            if any(word in _MORE_IS_BETTER for word in words):
                mode = "max"
            elif any(word in _LESS_IS_BETTER for word in words):
                mode = "min"
            else:
                raise UsageError(
                    f"whether more or less of '{metric}' is better is not known",
                    hint="Write mode='min' or 'max' (--mode).",
                )
        if mode not in ("min", "max"):
            raise UsageError(f"mode = {mode!r}: not one of 'min', 'max'.")
        return cls(metric, mode, is_open)

    def settle(self, returned: Iterable[str], mode: str | None = None) -> bool:
        """Where no metric was named, use the only one that a function returned; return whether it is another one."""
        names, was_open = list(returned), self.is_open
        if not names:
            return False
        self.is_open = False
        if not was_open or len(names) > 1 or names[0] == self.metric:
            return False
        objective = Objective.of(names[0], mode)
        self.metric, self.mode = objective.metric, objective.mode
        return True

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric's value, or None where it was not measured; `accuracy` finds `val/accuracy`."""
        for name in (self.metric, f"val/{self.metric}"):
            if name in metrics:
                return float(metrics[name])
        return None

    def goodness(self, value: float | None) -> float:
        """Return a number that is larger for a better value; a value that is not finite is the worst."""
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if self.mode == "max" else -value

    def missing(self, reported: Iterable[str], who: str) -> UsageError:
        """Return the error for a trial without the metric; it lists what was reported."""
        names = sorted(set(reported))
        if not names:
            return UsageError(
                f"{who} reported no '{self.metric}', nor anything else",
                hint="Return it from train_fn, call phalanx.tune.report(...), or train with a validation set.",
            )
        close = nearest(self.metric, names)
        guess = f" Did you mean '{close}'?" if close else ""
        return UsageError(f"{who} reported no '{self.metric}'.{guess} It reported: {', '.join(names)}.")


REPORTED = "tune"
"""The split under which `phalanx.tune.report` writes its events."""


class State(StrEnum):
    """The state of a trial."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    """By the scheduler."""
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether the trial has ended for good."""
        return self in (State.FINISHED, State.STOPPED, State.FAILED)


@dataclass
class Trial:
    """A trial and its record."""

    number: int
    params: dict[str, Any]
    folder: Path
    state: State = State.WAITING
    reports: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics by iteration: epochs of the training loop, or what the script counts."""
    steps: int = 0
    seconds: float = 0.0
    cause: str = ""
    """Why it failed."""
    stopped_at: int | None = None
    """The iteration after which the scheduler stopped it."""
    lineage: list[dict[str, Any]] = field(default_factory=list)
    """Population-based training: from which trial it continued, with which point, and after which iteration."""
    run_status: str = ""
    """How its run ended, where it used a Phalanx trainer."""
    passed: set[int] = field(default_factory=set)
    """The points at which its scheduler let it continue."""
    returned: dict[str, float] = field(default_factory=dict)
    """What its function returned."""
    _read: int = 0
    _logged: dict[str, float] = field(default_factory=dict)
    """What the user logged since the last epoch ended."""

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    @property
    def iteration(self) -> int:
        """The last iteration with a report."""
        return max(self.reports, default=0)

    @property
    def resumes_after(self) -> int:
        """The iteration after which it resumes when it is started now; 0 where nothing was saved."""
        return self.iteration if self.checkpoints.is_dir() and any(self.checkpoints.iterdir()) else 0

    @property
    def last(self) -> dict[str, float]:
        """The latest value of each metric."""
        merged: dict[str, float] = {}
        for iteration in sorted(self.reports):
            merged |= self.reports[iteration]
        return merged

    def value(self, objective: Objective) -> float | None:
        """Return the latest value of the objective's metric."""
        return objective.value(self.last)

    def value_from(self, iteration: int, objective: Objective) -> float | None:
        """Return the metric at the first report at or after an iteration that has it."""
        measured = self.measured_from(iteration, objective)
        return None if measured is None else objective.value(self.reports[measured])

    def measured_from(self, iteration: int, objective: Objective) -> int | None:
        """Return the first iteration at or after another at which the metric was measured."""
        reached = (number for number in sorted(self.reports) if number >= iteration)
        return next((number for number in reached if objective.value(self.reports[number]) is not None), None)

    def curve(self, objective: Objective) -> list[tuple[int, float]]:
        """Return the metric over iterations, where it is finite."""
        points = [(number, objective.value(self.reports[number])) for number in sorted(self.reports)]
        return [(number, value) for number, value in points if value is not None and math.isfinite(value)]

    def read_events(self) -> bool:
        """Read the events since the last reading; return whether there were new reports."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return False
        with path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the rest of a line is still being written
        self._read += len(whole)
        before = len(self.reports), self.iteration
        for line in whole.splitlines():
            self._add(line)
        return (len(self.reports), self.iteration) != before

    def _add(self, line: bytes) -> None:
        try:
            event = from_json(line)
        except (ValueError, TypeError):  # a killed writer's torn line
            return
        if isinstance(event, EpochDone):
            measured = {"train/loss": event.train_loss, **{f"val/{k}": v for k, v in event.val.items()}}
            self._report(event.epoch, self._logged | measured)
            self._logged = {}
        elif isinstance(event, MetricsReported) and event.split == REPORTED:
            # What a function returns (epoch 0) belongs to its last iteration.
            self._report(event.epoch or max(self.iteration, 1), event.values)
            self.returned = event.values if event.epoch == 0 else self.returned
        elif isinstance(event, MetricsReported) and event.split == LOGGED and event.epoch:
            self._logged |= event.values  # a part of the epoch's report, which comes when it ends
        elif isinstance(event, MetricsReported) and not event.epoch:  # a script counts no epochs
            self._report(max(self.iteration, 1), event.scalars())
        if isinstance(event, (EpochDone, StepDone, RunEnded)):
            self.steps = max(self.steps, event.step)
        if isinstance(event, RunEnded):
            self.run_status = event.status

    def _report(self, iteration: int, metrics: dict[str, float]) -> None:
        if self.stopped_at is None or iteration <= self.stopped_at:
            self.reports[iteration] = {**self.reports.get(iteration, {}), **metrics}

    def end_after(self, iteration: int) -> None:
        """Mark it as stopped after an iteration: later reports do not count."""
        self.stopped_at = iteration
        self.reports = {number: values for number, values in self.reports.items() if number <= iteration}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for reports."""
        return {
            "number": self.number,
            "params": self.params,
            "state": str(self.state),
            "iteration": self.iteration,
            "steps": self.steps,
            "seconds": self.seconds,
            "cause": self.cause,
            "metrics": self.last,
            "lineage": self.lineage,
            "folder": str(self.folder),
        }


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
    text = os.environ.get("PHALANX_CHECKPOINT_DIR")
    if text is None:
        raise UsageError("checkpoint_dir() is for trials: no trial runs here", hint="Start it with phalanx tune.")
    path = Path(text)
    path.mkdir(parents=True, exist_ok=True)
    return path
