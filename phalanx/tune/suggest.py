"""Which point a trial gets: drawn, counted through, or proposed by Optuna from what others found."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

from phalanx.errors import UsageError, unknown_name
from phalanx.tune.domains import Domain
from phalanx.tune.objective import Objective
from phalanx.tune.space import SearchSpace
from phalanx.tune.trial import State, Trial

SEARCHES = ("random", "grid", "optuna")


class Search(Protocol):
    """A way to choose points. The same seed, number and known trials give the same point."""

    @property
    def learns(self) -> bool:
        """Whether a point depends on what earlier trials found."""

    @property
    def size(self) -> int | None:
        """How many points there are; None: no end of them."""

    def point(self, number: int, known: Sequence[Trial]) -> dict[str, Any]:
        """Return the point of a trial."""


class RandomSearch:
    """Every point drawn by itself."""

    learns = False
    size = None

    def __init__(self, space: SearchSpace, seed: int) -> None:
        self._space, self._seed = space, seed

    def point(self, number: int, known: Sequence[Trial]) -> dict[str, Any]:
        """Draw."""
        return self._space.draw(self._seed, number)


class GridSearch:
    """Every point once, in order."""

    learns = False

    def __init__(self, space: SearchSpace) -> None:
        self._points = space.grid()
        self.size: int | None = len(self._points)

    def point(self, number: int, known: Sequence[Trial]) -> dict[str, Any]:
        """Return the next."""
        return self._points[number]


class OptunaSearch:
    """Optuna's tree-structured Parzen estimator (TPE) over what the known trials found.

    A sampler of its own for each point, with a seed of its own: what it proposes depends on nothing but the trials it
    is shown, so a search that was interrupted goes on as if it had not been.
    """

    learns = True
    size = None

    def __init__(self, space: SearchSpace, seed: int, objective: Objective) -> None:
        self._space, self._seed, self._objective = space, seed, objective
        self._optuna = import_optuna("search = 'optuna'")

    def point(self, number: int, known: Sequence[Trial]) -> dict[str, Any]:
        """Ask a fresh study that holds the known trials."""
        optuna = self._optuna
        seed = zlib.crc32(f"{self._seed}/{number}".encode())
        direction = "maximize" if self._objective.mode == "max" else "minimize"
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction=direction)
        study.add_trials([self._as_frozen(trial) for trial in known])
        asked = study.ask()
        return self._space.visit(lambda name, domain: suggest(asked, name, domain))

    def _as_frozen(self, trial: Trial) -> Any:
        optuna, value = self._optuna, trial.value(self._objective)
        usable = trial.state in (State.FINISHED, State.STOPPED) and value is not None and math.isfinite(value)
        domains = {name: self._space.domains[name] for name in trial.params if name in self._space.domains}
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.COMPLETE if usable else optuna.trial.TrialState.FAIL,
            value=value if usable else None,
            params={name: stored(domain, trial.params[name]) for name, domain in domains.items()},
            distributions={name: distribution(domain) for name, domain in domains.items()},
        )


def import_optuna(who: str) -> Any:
    """Import Optuna quietly, or say what brings it."""
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            f"{who} needs Optuna, which is not installed", hint="Run: pip install 'phalanx[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def distribution(domain: Domain) -> Any:
    """Return a domain in Optuna's words."""
    from optuna import distributions as words

    if domain.kind == "choice":
        return words.CategoricalDistribution(tuple(stored(domain, value) for value in domain.arguments))
    if domain.meaning.log:  # Optuna has no steps on a logarithm: the value is rounded afterwards
        kind = words.IntDistribution if domain.meaning.integer else words.FloatDistribution
        return kind(domain.low, domain.high, log=True)
    kind = words.IntDistribution if domain.meaning.integer else words.FloatDistribution
    return kind(domain.low, _last(domain), step=domain.step)


def _last(domain: Domain) -> Any:
    """Return the last value in steps from the lower bound: Optuna warns of a range that they do not divide."""
    if domain.step is None:
        return domain.high
    last = domain.low + math.floor((domain.high - domain.low) / domain.step + 1e-9) * domain.step
    return last if domain.meaning.integer else round(last, 12)


def suggest(asked: Any, name: str, domain: Domain) -> Any:
    """Let Optuna choose a value."""
    if domain.kind == "choice":
        names = [stored(domain, value) for value in domain.arguments]
        return domain.arguments[names.index(asked.suggest_categorical(name, names))]
    words = distribution(domain)
    ask = asked.suggest_int if domain.meaning.integer else asked.suggest_float
    return domain.snap(ask(name, words.low, words.high, step=words.step, log=words.log))


def stored(domain: Domain, value: Any) -> Any:
    """Return a value as Optuna's storage can hold it; a choice that is neither number nor text by its looks."""
    plain = domain.kind != "choice" or value is None or isinstance(value, (bool, int, float, str))
    return value if plain else repr(value)


def make_search(name: str, space: SearchSpace, seed: int, objective: Objective) -> Search:
    """Return a search by its name."""
    if name not in SEARCHES:
        raise UsageError(unknown_name("search", name, SEARCHES))
    if name == "grid":
        return GridSearch(space)
    return RandomSearch(space, seed) if name == "random" else OptunaSearch(space, seed, objective)
