"""Who goes on: rules that give up bad trials early. Pure functions of what was reported.

A trial's verdict at a point uses only the reports of trials with lower numbers and its own, and waits for those that
have yet to come to that point. So the verdicts do not depend on who happened to run faster, and a search with the same
seed gives the same trials, verdicts and best point again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from phalanx.errors import UsageError, unknown_name
from phalanx.tune.objective import Objective
from phalanx.tune.trial import Trial

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


class Scheduler(Protocol):
    """A rule that gives up trials."""

    @property
    def points(self) -> Points | None:
        """Where it is asked; None: nowhere."""

    def verdict(self, trial: Trial, point: int, others: Sequence[Trial], objective: Objective) -> bool | None:
        """Whether the trial goes on after a point; None: not known before others have come there."""


@dataclass(frozen=True)
class NoScheduler:
    """Every trial runs to its end."""

    @property
    def points(self) -> None:
        """Nobody is asked."""
        return

    def verdict(self, trial: Trial, point: int, others: Sequence[Trial], objective: Objective) -> bool:
        """Go on."""
        return True


@dataclass(frozen=True)
class Asha:
    """Asynchronous successive halving: at 1, eta, eta^2, ... iterations only the best 1/eta so far go on."""

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
        """Keep what is among the best 1/eta of those that came here; the first is."""
        if _someone_is_behind(others, point, objective):
            return None
        mine = objective.goodness(trial.value_from(point, objective))
        values = [trial.value_from(point, objective) for trial in others]
        ahead = sum(objective.goodness(value) >= mine for value in values if value is not None)
        came = 1 + sum(value is not None for value in values)
        return ahead < max(1, came // self.eta)


@dataclass(frozen=True)
class Median:
    """Give up what is worse than the median of earlier trials at the same iteration."""

    grace: int = 1
    """Iterations that every trial gets."""
    least: int = 3
    """Trials that must have come as far before any is given up."""

    def __post_init__(self) -> None:
        if self.grace < 1:
            raise UsageError(f"median: grace = {self.grace}: must be 1 or more")

    @property
    def points(self) -> Points:
        """Every iteration after the grace."""
        return Points(None, self.grace)

    def verdict(self, trial: Trial, point: int, others: Sequence[Trial], objective: Objective) -> bool | None:
        """Compare with those that came here."""
        if _someone_is_behind(others, point, objective):
            return None
        came = [value for other in others if (value := other.value_from(point, objective)) is not None]
        if len(came) < self.least:
            return True
        mine = trial.value_from(point, objective)
        return objective.goodness(mine) >= statistics.median(objective.goodness(value) for value in came)


def _someone_is_behind(others: Sequence[Trial], point: int, objective: Objective) -> bool:
    """Whether a trial that counts may yet measure the metric at this point."""
    return any(not other.state.is_final and other.value_from(point, objective) is None for other in others)


def undecided(trial: Trial, scheduler: Scheduler, objective: Objective) -> list[int]:
    """Return the points at which a trial has measured the metric, and has no verdict yet."""
    crossed = scheduler.points.crossed(trial.iteration) if scheduler.points is not None else []
    return [
        point for point in crossed if point not in trial.passed and trial.measured_from(point, objective) is not None
    ]


def _runs(trial: Trial) -> bool:
    return not trial.state.is_final and trial.stopped_at is None


def decide(trial: Trial, others: Sequence[Trial], scheduler: Scheduler, objective: Objective) -> bool | None:
    """Give a trial its verdicts, and return whether it goes on from where it stands; None: not known yet.

    `others`: those with lower numbers, whose own verdicts have been given as far as they can be. A trial that is given
    up keeps its reports up to the one that was judged.
    """
    open_points = [min(undecided(other, scheduler, objective), default=_FARTHEST) for other in others if _runs(other)]
    for point in undecided(trial, scheduler, objective):
        if min(open_points, default=_FARTHEST) < point:
            return None  # a report that comes after an open verdict may yet turn out not to count
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
    return Median(grace) if name == "median" else NoScheduler()
