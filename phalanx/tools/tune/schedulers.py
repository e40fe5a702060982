"""Schedulers: rules that stop bad trials early, as pure functions of what was reported.

A trial's verdict at a point uses only the reports of trials with lower numbers and its own, and waits for those that
have not reached that point. So verdicts do not depend on which trial ran faster, and a search with the same seed gives
the same trials, verdicts and best point again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.errors import UsageError, unknown_name
from phalanx.tools.tune.trial import Objective, Trial

SCHEDULERS = ("asha", "pbt", "median", "none")
_FARTHEST = 10**7


class Points(NamedTuple):
    """The iterations at which trials wait for a verdict: these, or every `every`-th one from `first` on."""

    at: tuple[int, ...] | None
    first: int = 1
    every: int = 1

    def crossed(self, iteration: int) -> list[int]:
        """Return the points up to an iteration."""
        if self.at is not None:
            return [point for point in self.at if point <= iteration]
        return [number for number in range(self.first, iteration + 1) if number % self.every == 0]


@dataclass(frozen=True)
class Scheduler:
    """No scheduler: every trial runs to its end."""

    @property
    def points(self) -> Points | None:
        """The iterations with a verdict; None: there are none."""
        return None

    def verdict(self, trial: Trial, point: int, others: Sequence[Trial], objective: Objective) -> bool | None:
        """Whether the trial continues after a point; None: not known before others have reached it."""
        return True


@dataclass(frozen=True)
class Asha(Scheduler):
    """Asynchronous successive halving: at 1, eta, eta^2, ... iterations only the best 1/eta so far continue."""

    eta: int = 3
    grace: int = 1
    """Iterations that every trial gets."""

    def __post_init__(self) -> None:
        if self.eta < 2 or self.grace < 1:
            raise UsageError(f"asha: eta = {self.eta}, grace = {self.grace}: eta is 2 or more, grace 1 or more")

    @property
    def points(self) -> Points:
        """The rungs."""
        rungs, rung = [], self.grace
        while rung < _FARTHEST:
            rungs.append(rung)
            rung *= self.eta
        return Points(tuple(rungs))

    def verdict(self, trial: Trial, point: int, others: Sequence[Trial], objective: Objective) -> bool | None:
        """Continue if the trial is among the best 1/eta of those that reached the point; the first one is."""
        if _some_are_behind(others, point, objective):
            return None
        goodness = objective.goodness(trial.value_from(point, objective))
        values = [value for other in others if (value := other.value_from(point, objective)) is not None]
        ahead = sum(objective.goodness(value) >= goodness for value in values)
        return ahead < max(1, (1 + len(values)) // self.eta)


@dataclass(frozen=True)
class Median(Scheduler):
    """Stops trials that are worse than the median of earlier trials at the same iteration."""

    grace: int = 1
    """Iterations that every trial gets."""
    least: int = 3
    """Trials that must have reached a point before any is stopped there."""

    def __post_init__(self) -> None:
        if self.grace < 1:
            raise UsageError(f"median: grace = {self.grace}: must be 1 or more")

    @property
    def points(self) -> Points:
        """Every iteration after the grace."""
        return Points(None, self.grace)

    def verdict(self, trial: Trial, point: int, others: Sequence[Trial], objective: Objective) -> bool | None:
        """Continue if the trial is not worse than the median of those that reached the point."""
        if _some_are_behind(others, point, objective):
            return None
        values = [value for other in others if (value := other.value_from(point, objective)) is not None]
        if len(values) < self.least:
            return True
        goodness = objective.goodness(trial.value_from(point, objective))
        return goodness >= statistics.median(objective.goodness(value) for value in values)


def _some_are_behind(others: Sequence[Trial], point: int, objective: Objective) -> bool:
    """Whether an earlier trial may still measure the metric at this point."""
    return any(not other.state.is_final and other.value_from(point, objective) is None for other in others)


def undecided(trial: Trial, scheduler: Scheduler, objective: Objective) -> list[int]:
    """Return the points at which a trial has measured the metric, and has no verdict yet."""
    crossed = scheduler.points.crossed(trial.iteration) if scheduler.points is not None else []
    return [
        point for point in crossed if point not in trial.passed and trial.measured_from(point, objective) is not None
    ]


def decide(trial: Trial, others: Sequence[Trial], scheduler: Scheduler, objective: Objective) -> bool | None:
    """Give a trial its verdicts, and return whether it continues from its last report; None: not known yet.

    `others`: those with lower numbers, which have their verdicts as far as these are known. A trial that is stopped
    keeps its reports up to the one that was judged.
    """
    running = [other for other in others if not other.state.is_final and other.stopped_at is None]
    open_points = [min(undecided(other, scheduler, objective), default=_FARTHEST) for other in running]
    for point in undecided(trial, scheduler, objective):
        if min(open_points, default=_FARTHEST) < point:
            return None  # a report after an open verdict may turn out not to count
        verdict = scheduler.verdict(trial, point, others, objective)
        if verdict is None:
            return None
        if not verdict:
            judged = trial.measured_from(point, objective)
            assert judged is not None, "a verdict needs the metric"
            trial.end_after(judged)
            return False
        trial.passed.add(point)
    return True


def make_scheduler(name: str, *, eta: int = 3, grace: int = 1) -> Scheduler:
    """Return a scheduler by its name."""
    if name not in SCHEDULERS:
        raise UsageError(unknown_name("scheduler", name, SCHEDULERS))
    if name == "asha":
        return Asha(eta, grace)
    return Median(grace) if name == "median" else Scheduler()
