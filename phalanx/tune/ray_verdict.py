"""Verdicts on Ray: each trial's worker judges its own trial, by our rules, from what the earlier ones wrote down.

All machines see the study's folder, so that nobody has to be asked. A verdict waits for the trials with lower numbers
exactly as on the local engine, and is the same, whoever happens to run faster.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.tune.runner import gate_of
from phalanx.tune.trial import State, Trial

if TYPE_CHECKING:
    from phalanx.tune.objective import Objective
    from phalanx.tune.schedulers import Scheduler

_MARK = "ended"
"""The file in a trial's folder that says that nothing more comes."""


def folder_of(folder: str, number: int) -> Path:
    """Return the folder of a trial."""
    return Path(folder) / "trials" / f"{number:04d}"


def marking_callback(folder: str) -> Any:
    """Return Ray's callback that lets the workers of later trials know that one has come to its end."""
    from ray.tune import Callback

    class Mark(Callback):
        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            _mark(folder_of(folder, number_of(trial.trial_id)), State.FINISHED)

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            _mark(folder_of(folder, number_of(trial.trial_id)), State.FAILED)

    return Mark()


def _mark(trial: Path, state: State) -> None:
    trial.mkdir(parents=True, exist_ok=True)
    fresh = trial / f"{_MARK}.new"
    fresh.write_text(str(state))
    fresh.replace(trial / _MARK)


def number_of(trial_id: str) -> int:
    """Return a trial's number: Ray puts it at the end of the trial's name."""
    return int(trial_id.rsplit("_", 1)[1])


class Judge:
    """Lets one trial pass its points, or gives it up."""

    def __init__(self, trial: Trial, scheduler: Scheduler, objective: Objective, folder: str) -> None:
        assert scheduler.points is not None, "there is no judge without points"
        gate = gate_of(trial, scheduler.points)
        assert gate is not None, "there are points, so there is a gate"
        self._trial, self._scheduler, self._objective = trial, scheduler, objective
        self._points, self._gate = scheduler.points, gate
        self._others = [Trial(number, {}, folder_of(folder, number)) for number in range(trial.number)]
        self._gate.let_through(trial.iteration)

    def judge(self) -> None:
        """Give the verdict on where the trial stands, if it can be given now."""
        trial = self._trial
        for point in self._points.crossed(trial.iteration):
            if point in trial.passed or trial.value_from(point, self._objective) is None:
                continue
            self._read_others()
            verdict = self._scheduler.verdict(trial, point, self._others, self._objective)
            if verdict is None:
                return
            if not verdict:
                trial.end_after(min(number for number in trial.reports if number >= point))
                self._gate.stop_at(trial.iteration)
                return
            trial.passed.add(point)
        if trial.iteration:
            self._gate.let_through(trial.iteration)

    def _read_others(self) -> None:
        """Read whether a trial has ended first: then all that it reported is there to be read."""
        for other in self._others:
            mark = other.folder / _MARK
            if not other.state.is_final and mark.exists():
                other.state = State(mark.read_text())
            other.read_events()
