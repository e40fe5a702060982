"""Verdicts on Ray: each trial's worker judges its own trial, by our rules, from what the earlier ones wrote down.

All machines see the study's folder, so that nobody has to be asked. A verdict waits for the trials with lower numbers
exactly as on the local engine, and is the same, whoever happens to run faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.tune.ray_record import folder_of, read_up
from phalanx.tune.runner import gate_of
from phalanx.tune.schedulers import decide, undecided
from phalanx.tune.trial import Trial

if TYPE_CHECKING:
    from phalanx.tune.objective import Objective
    from phalanx.tune.schedulers import Scheduler


class Judge:
    """Lets one trial pass its points, or gives it up."""

    def __init__(self, trial: Trial, scheduler: Scheduler, objective: Objective, folder: str) -> None:
        assert scheduler.points is not None, "there is no judge without points"
        gate = gate_of(trial, scheduler.points)
        assert gate is not None, "there are points, so there is a gate"
        self._trial, self._scheduler, self._objective = trial, scheduler, objective
        self._gate = gate
        self._others = [Trial(number, {}, folder_of(folder, number)) for number in range(trial.number)]
        self._gate.let_through(trial.iteration)

    def judge(self) -> None:
        """Give the verdict on where the trial stands, if it can be given now."""
        trial = self._trial
        if undecided(trial, self._scheduler, self._objective):
            self._judge_others()
        goes_on = decide(trial, self._others, self._scheduler, self._objective)
        if goes_on is False:
            self._gate.stop_at(trial.iteration)
        elif goes_on and trial.iteration:
            self._gate.let_through(trial.iteration)

    def _judge_others(self) -> None:
        """Give the others' verdicts here too, lower numbers first: reports after one that gives up do not count."""
        for other in self._others:
            read_up(other)
            if not other.state.is_final and other.stopped_at is None:
                decide(other, self._others[: other.number], self._scheduler, self._objective)
