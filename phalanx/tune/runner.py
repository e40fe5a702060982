"""Run one trial to its end: a launch of its own, watched by whoever called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import EXIT_PREEMPTED, PhalanxError
from phalanx.host.signals import SignalInbox
from phalanx.launch import LaunchResult, launch
from phalanx.launch.error_file import read_record
from phalanx.observe.control import CONTROL, TrialControl
from phalanx.observe.guard import Guard, Streams, say_to_user
from phalanx.runs.preflight import check_packages
from phalanx.runs.spec import launch_spec
from phalanx.tune.reporting import GOES_ON_AFTER
from phalanx.tune.schedulers import Points
from phalanx.tune.slots import Slot
from phalanx.tune.trainable import Trainable
from phalanx.tune.trial import Trial
from phalanx.world.layout import plan_layout

_OUT_OF_MEMORY = {"OutOfMemoryError", "MemoryError"}
_KILLED = 137


@dataclass(frozen=True)
class Ending:
    """How a trial's run ended."""

    exit_code: int
    cause: str = ""
    """Why it failed; empty where it did not."""

    @property
    def was_told_to(self) -> bool:
        """Whether it left because it was asked to."""
        return self.exit_code == EXIT_PREEMPTED


class TrialConsole:
    """Shows nothing: a trial's output is in its logs, and its events only ring the bell of who watches it."""

    def __init__(self, trial: Trial, bell: Callable[[], None]) -> None:
        self._notices = trial.folder / "launcher.log"
        self._guard = Guard(str(self._notices), say_to_user)
        self._bell = bell
        self.streams = Streams()

    def rank_output(self, rank: int, label: str, text: str, *, err: bool = False) -> None:
        """Leave it to the log."""

    def handle(self, event: dict[str, Any]) -> None:
        """Ring: the trial's events.jsonl has news."""
        if event.get("event") in ("epoch", "metrics", "run_ended"):
            self._bell()

    def notice(self, text: str) -> None:
        """Keep the launcher's words beside the trial."""

        def keep() -> None:
            with self._notices.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

        self._guard.attempt(keep)


def gate_of(trial: Trial, points: Points | None) -> TrialControl | None:
    """Return the gate at which a trial waits for its scheduler's word."""
    if points is None:
        return None
    return TrialControl(trial.folder.absolute() / "gate.json", points.at, points.first, points.every)


def run_trial(
    subject: Trainable,
    trial: Trial,
    slot: Slot,
    *,
    points: Points | None,
    threads_per_rank: int | None = None,
    env: Mapping[str, str] | None = None,
    bell: Callable[[], None] = lambda: None,
    signals: SignalInbox | None = None,
) -> Ending:
    """Start the trial's ranks, wait for their end, and say how it was. What went wrong is told, not raised."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    try:
        parts = subject.parts(trial)
        config = parts.config
        if threads_per_rank is not None:
            config = config.with_trusted(threads_per_rank=threads_per_rank)
        layout = plan_layout(config, len(slot.gpus))
        check_packages(config)
        gate = gate_of(trial, points)
        extra = {"PHALANX_TRIAL": str(trial.number), "PHALANX_DEVICE": layout.device, **slot.environment()}
        extra[GOES_ON_AFTER] = str(trial.goes_on_after)
        if gate is not None:
            extra[CONTROL] = gate.to_text()
        spec = launch_spec(
            config, layout, parts.target, trial.folder / "logs", env={**(env or {}), **parts.env, **extra}
        )
        return explain(launch(spec, TrialConsole(trial, bell), signals), trial)
    except PhalanxError as error:
        return Ending(error.exit_code, str(error.message))


def explain(result: LaunchResult, trial: Trial) -> Ending:
    """Put how a launch ended into a sentence that groups with its like."""
    failure = result.failure
    if failure is None:
        told = result.exit_code in (0, EXIT_PREEMPTED)
        return Ending(result.exit_code, "" if told else f"ended with exit code {result.exit_code}")
    record = None if failure.rank is None else read_record(trial.folder / "logs", failure.rank)
    kind = record["type"] if record is not None else ""
    if kind in _OUT_OF_MEMORY:
        return Ending(result.exit_code, f"out of memory: {_first_line(record['message'] if record else '')}")
    if record is None and result.exit_code == _KILLED:
        return Ending(result.exit_code, f"out of memory, or killed: a rank {failure.cause}")
    if record is None:
        return Ending(result.exit_code, failure.cause)
    words = _first_line(record["message"])
    is_ours = not record["traceback"]  # a mistake that is told in full by its own words
    return Ending(result.exit_code, words if is_ours else f"{kind}: {words}")


def nonfinite(metric: str, value: float, iteration: int) -> str:
    """Say that a metric is no number."""
    word = "NaN" if math.isnan(value) else "infinite"
    return f"{metric} became {word} at iteration {iteration}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
