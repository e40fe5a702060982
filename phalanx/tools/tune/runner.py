"""Run one trial to its end, as one launch."""

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
from phalanx.tools.tune.reporting import RESUMES_AFTER
from phalanx.tools.tune.schedulers import Points
from phalanx.tools.tune.slots import Slot
from phalanx.tools.tune.trainable import Trainable
from phalanx.tools.tune.trial import Trial
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
    def stopped_on_request(self) -> bool:
        """Whether it stopped because it was asked to."""
        return self.exit_code == EXIT_PREEMPTED


class TrialConsole:
    """Shows nothing: a trial's output is in its logs, and its events only wake the thread that follows it."""

    def __init__(self, trial: Trial, wake: Callable[[], None]) -> None:
        self._notices = trial.folder / "launcher.log"
        self._guard = Guard(str(self._notices), say_to_user)
        self._wake = wake
        self.streams = Streams()

    def rank_output(self, rank: int, label: str, text: str, *, err: bool = False) -> None:
        """Do nothing: the log has it."""

    def handle(self, event: dict[str, Any]) -> None:
        """Wake the follower where the trial's events.jsonl has new metrics."""
        if event.get("event") in ("epoch", "metrics", "run_ended"):
            self._wake()

    def notice(self, text: str) -> None:
        """Write the launcher's messages to the trial's folder."""

        def keep() -> None:
            with self._notices.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

        self._guard.attempt(keep)


def control_of(trial: Trial, points: Points | None) -> TrialControl | None:
    """Return the file through which a trial receives its scheduler's verdicts."""
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
    wake: Callable[[], None] = lambda: None,
    signals: SignalInbox | None = None,
) -> Ending:
    """Start the trial's ranks, wait for their end, and return how it ended; errors are returned, not raised."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    try:
        parts = subject.parts(trial)
        config = parts.config
        if threads_per_rank is not None:
            config = config.with_trusted(threads_per_rank=threads_per_rank)
        layout = plan_layout(config, len(slot.gpus))
        check_packages(config)
        extra = {"PHALANX_TRIAL": str(trial.number), "PHALANX_DEVICE": layout.device, **slot.environment()}
        extra[RESUMES_AFTER] = str(trial.resumes_after)
        if (control := control_of(trial, points)) is not None:
            extra[CONTROL] = control.to_text()
        spec = launch_spec(
            config, layout, parts.target, trial.folder / "logs", env={**(env or {}), **parts.env, **extra}
        )
        return explain(launch(spec, TrialConsole(trial, wake), signals), trial)
    except PhalanxError as error:
        return Ending(error.exit_code, str(error.message))


def explain(result: LaunchResult, trial: Trial) -> Ending:
    """Return a launch's end with its cause as one sentence, equal for equal causes."""
    code, failure = result.exit_code, result.failure
    if failure is None:
        return Ending(code, "" if code in (0, EXIT_PREEMPTED) else f"ended with exit code {code}")
    record = None if failure.rank is None else read_record(trial.folder / "logs", failure.rank)
    if record is None:
        return Ending(code, f"out of memory, or killed: a rank {failure.cause}" if code == _KILLED else failure.cause)
    first_line = next(iter(record["message"].strip().splitlines()), "")
    if record["type"] in _OUT_OF_MEMORY:
        return Ending(code, f"out of memory: {first_line}")
    # Without a traceback it is a mistake that its message explains.
    return Ending(code, f"{record['type']}: {first_line}" if record["traceback"] else first_line)


def nonfinite(metric: str, value: float, iteration: int) -> str:
    """Return the cause of failure of a trial whose metric is not finite."""
    return f"{metric} became {'NaN' if math.isnan(value) else 'infinite'} at iteration {iteration}"
