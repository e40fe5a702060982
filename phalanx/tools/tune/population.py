"""Population-based training: every few iterations the worst trials continue from the weights and settings of the best.

All members reach the same iteration before they are compared, so the outcome does not depend on their speed, and a
population may be larger than the number of trials that run at once. Between generations their state is in checkpoints.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.tools.tune.engine import Pool, SearchEngine, SearchPlan
from phalanx.tools.tune.executor import Ending
from phalanx.tools.tune.record import Record
from phalanx.tools.tune.results import LiveTable, PlainTable
from phalanx.tools.tune.schedulers import Points
from phalanx.tools.tune.trial import Objective, State, Trial

_QUANTILE = 0.25


def exploits(
    members: Sequence[Trial], boundary: int, objective: Objective, seed: int
) -> list[tuple[Trial, Trial, random.Random]]:
    """Return (loser, winner, random numbers): each of the worst quarter continues from one of the best quarter."""
    ranked = sorted(
        members, key=lambda trial: (-objective.goodness(trial.value_from(boundary, objective)), trial.number)
    )
    count = min(max(1, int(len(ranked) * _QUANTILE)), len(ranked) // 2)
    pairs = []
    for loser in sorted(ranked[len(ranked) - count :] if count else [], key=lambda trial: trial.number):
        rng = random.Random(f"{seed}/{boundary}/{loser.number}")
        pairs.append((loser, rng.choice(ranked[:count]), rng))
    return pairs


class Population(SearchEngine):
    """Runs members in generations of `interval` iterations."""

    def __init__(
        self,
        plan: SearchPlan,
        record: Record,
        view: PlainTable | LiveTable,
        *,
        interval: int = 1,
        mutate: Sequence[str] | None = None,
    ) -> None:
        super().__init__(plan, record, view)
        if interval < 1:
            raise UsageError(f"pbt: an interval of {interval} iterations: must be 1 or more")
        self._interval = interval
        self._mutate = mutate
        self.points = Points(None, 1, interval)
        while len(self.trials) < plan.total:
            self.trials.append(record.open_trial(plan.search.point(len(self.trials), [])))
        self._generation: int = record.get("generation", 0)

    @property
    def boundary(self) -> int:
        """The iteration at which this generation ends."""
        return (self._generation + 1) * self._interval

    def fill(self, pool: Pool) -> None:
        """Start members that have not reached the boundary; when all have, begin the next generation."""
        if not pool.running and not self._behind() and self._alive():
            self._next_generation()
        for trial in self._behind():
            if trial.state is not State.RUNNING and pool.has_room:
                self.start(trial, pool, stop_at=self.boundary)

    def _alive(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.state.is_final]

    def _behind(self) -> list[Trial]:
        return [trial for trial in self._alive() if trial.iteration < self.boundary]

    def outcome(self, trial: Trial, ending: Ending) -> State:
        """Return PAUSED for a member that was stopped at the boundary: it continues in the next generation."""
        stopped = ending.stopped_on_request or trial.run_status == "stopped"
        return State.PAUSED if stopped else State.FINISHED

    def _next_generation(self) -> None:
        """Let the worst continue from the best; the generation ends after that, so an interruption repeats it."""
        for loser, winner, rng in exploits(self._alive(), self.boundary, self.plan.objective, self.plan.seed):
            copy_checkpoints(winner.checkpoints, loser.checkpoints)
            loser.params = self.plan.space.perturbed(winner.params, rng, self._mutate)
            entry = {"iteration": self.boundary, "from": winner.number, "params": loser.params}
            loser.lineage = [one for one in loser.lineage if one["iteration"] != self.boundary] + [entry]
            self.record.update(loser)
            self.view.notice(
                f"after iteration {self.boundary} trial {loser.number} continues from trial {winner.number}: "
                + ", ".join(f"{name} {value}" for name, value in loser.params.items())
            )
        self._generation += 1
        self.record.set("generation", self._generation)


def copy_checkpoints(source: Path, target: Path) -> None:
    """Replace one trial's checkpoints by another's, all or none."""
    fresh, old = target.with_name("checkpoints.new"), target.with_name("checkpoints.old")
    if not source.is_dir() or not any(source.iterdir()):
        raise UsageError(
            f"{source.parent} has no checkpoint from which another trial could continue",
            hint="Train with a Phalanx trainer, or save into phalanx.tune.checkpoint_dir() before each report.",
        )
    for path in (fresh, old):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, fresh)
    if target.exists():
        target.replace(old)
    fresh.replace(target)
    shutil.rmtree(old, ignore_errors=True)
