"""The point of each trial: drawn at random, from a grid, or proposed by Optuna from earlier results."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

from phalanx.errors import UsageError, unknown_name
from phalanx.tools.tune.domains import import_optuna, random_trial
from phalanx.tools.tune.objective import Objective
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.trial import State, Trial

SEARCHES = ("random", "grid", "optuna")


class Search:
    """Random search. The same seed, number and known trials give the same point, in all searches."""

    learns = False
    """Whether a point depends on the results of earlier trials."""
    size: int | None = None
    """The number of points; None: unlimited."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        self._space, self._seed = space, seed

    def point(self, number: int, known: Sequence[Trial]) -> dict[str, Any]:
        """Return the point of a trial; `known`: the earlier trials with their results."""
        return self._space.suggested(random_trial(f"{self._seed}/{number}"))


class GridSearch(Search):
    """Every point once, in order."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        super().__init__(space, seed)
        self._points = space.grid()
        self.size = len(self._points)

    def point(self, number: int, known: Sequence[Trial]) -> dict[str, Any]:
        """Return the point with this number."""
        return self._points[number]


class PartOfSearch(Search):
    """Every n-th point of another search, for one of several jobs that share the work."""

    def __init__(self, whole: Search, index: int, count: int) -> None:
        self._whole, self._index, self._count = whole, index, count

    def point(self, number: int, known: Sequence[Trial]) -> dict[str, Any]:
        """Return the point that the whole search has at this place."""
        return self._whole.point(self._index + number * self._count, known)


class OptunaSearch(Search):
    """Optuna's tree-structured Parzen estimator (TPE) over the results of the known trials.

    Each point has a new sampler with its own seed: the proposal depends on the known trials only, so an interrupted
    search continues as if it had not been interrupted.
    """

    learns = True

    def __init__(self, space: SearchSpace, seed: int, objective: Objective) -> None:
        super().__init__(space, seed)
        self._objective = objective
        self._optuna = import_optuna("search = 'optuna'")

    def point(self, number: int, known: Sequence[Trial]) -> dict[str, Any]:
        """Ask a new study that holds the known trials."""
        optuna = self._optuna
        seed = zlib.crc32(f"{self._seed}/{number}".encode())
        direction = "maximize" if self._objective.mode == "max" else "minimize"
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction=direction)
        study.add_trials([self._as_frozen(trial) for trial in known])
        return self._space.suggested(study.ask())

    def _as_frozen(self, trial: Trial) -> Any:
        optuna, value = self._optuna, trial.value(self._objective)
        usable = trial.state in (State.FINISHED, State.STOPPED) and value is not None and math.isfinite(value)
        domains = {name: self._space.domains[name] for name in trial.params if name in self._space.domains}
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.COMPLETE if usable else optuna.trial.TrialState.FAIL,
            value=value if usable else None,
            params={name: domain.stored(trial.params[name]) for name, domain in domains.items()},
            distributions={name: domain.distribution() for name, domain in domains.items()},
        )


def make_search(name: str, space: SearchSpace, seed: int, objective: Objective) -> Search:
    """Return a search by its name."""
    if name not in SEARCHES:
        raise UsageError(unknown_name("search", name, SEARCHES))
    if name == "grid":
        return GridSearch(space, seed)
    return Search(space, seed) if name == "random" else OptunaSearch(space, seed, objective)
