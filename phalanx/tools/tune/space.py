"""A search space: hyperparameters by name, checked as a whole; and the searches that choose points of it."""

from __future__ import annotations

import itertools
import math
import random
import tomllib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.config.aliases import NAMES
from phalanx.config.option import problem
from phalanx.errors import ConfigError, UsageError, nearest, unknown_name
from phalanx.tools.tune.domains import KINDS, Domain, from_ray, import_optuna, is_rays, random_trial
from phalanx.tools.tune.trial import Objective, State, Trial

_RESAMPLE_CHANCE = 0.25
"""How often population-based training draws a new value instead of one nearby."""
_EXAMPLE = "learning_rate = { loguniform = [1e-4, 1e-1] }"


class SearchSpace:
    """Domains and fixed values by name. Building one checks everything and reports all mistakes at once."""

    def __init__(self, entries: Mapping[str, Any], *, source: str = "search_space") -> None:
        self._in_python = source == "search_space"
        self.domains: dict[str, Domain] = {}
        self.fixed: dict[str, Any] = {}
        mistakes: list[str] = []
        for name, entry in entries.items():
            try:
                self._add(name, entry)
            except ValueError as error:
                mistakes.append(f"{name}: {error}.")
        mistakes += self._mistakes(set(entries))
        if not entries:
            example = "{'lr': phalanx.tune.loguniform(1e-4, 1e-1)}" if self._in_python else _EXAMPLE
            mistakes.append(f"it is empty. Write for example {example}")
        if mistakes:
            raise ConfigError(mistakes, source=source)

    @classmethod
    def read(cls, path: str | Path) -> SearchSpace:
        """Read a TOML file."""
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(f"no such search space: {path}", hint=f"Write one with lines like: {_EXAMPLE}") from None
        except IsADirectoryError:
            raise UsageError(f"{path} is a directory, not a TOML file") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from None
        return cls({name.replace("-", "_"): entry for name, entry in document.items()}, source=str(path))

    def _add(self, name: str, entry: Any) -> None:
        if is_rays(entry):
            entry = from_ray(entry)
        if isinstance(entry, Mapping):
            entry = _domain(entry)
        if isinstance(entry, Domain):
            self.domains[name] = entry
        elif isinstance(entry, (list, tuple, set)):
            raise ValueError(_about_list(entry, in_python=self._in_python))
        else:
            self.fixed[name] = entry

    def _mistakes(self, names: set[str]) -> list[str]:
        mistakes: list[str] = []
        for name, domain in self.domains.items():
            wrong = domain.mistakes()
            mistakes += [f"{name}: {text}." for text in wrong] or self._unfit_values(name, domain)
            mistakes += self._condition_mistakes(name, domain, names)
        fixed = [(NAMES[name], value) for name, value in self.fixed.items() if name in NAMES]
        mistakes += [text for field, value in fixed if (text := problem(field, value))]
        if not mistakes:
            try:
                self._order()
            except ValueError as error:
                mistakes.append(str(error))
        return mistakes

    def _unfit_values(self, name: str, domain: Domain) -> list[str]:
        """Return the errors for values that the setting of this name does not allow."""
        if name not in NAMES:
            return []
        values: Iterable[Any] = domain.arguments if domain.kind == "choice" else (domain.low, domain.high)
        return list(dict.fromkeys(text for value in values if (text := problem(NAMES[name], value))))

    def _condition_mistakes(self, name: str, domain: Domain, names: set[str]) -> list[str]:
        mistakes = []
        for other, condition in domain.when.items():
            if other not in names:
                close = nearest(other, names - {name})
                guess = f" Did you mean '{close}'?" if close else ""
                mistakes.append(f"{name}: its condition asks for '{other}', which is not in the space.{guess}")
                continue
            possible = [self.fixed[other]] if other in self.fixed else None
            if other in self.domains:
                possible = self.domains[other].grid()
            missing = [value for value in _as_list(condition) if possible is not None and value not in possible]
            mistakes += [f"{name}: its condition {other} = {value!r} is never true." for value in missing]
        return mistakes

    def _order(self) -> list[str]:
        """Return the names so that each comes after those in its condition."""
        done: list[str] = []
        trail: list[str] = []

        def visit(name: str) -> None:
            if name in done or name not in self.domains:
                return
            if name in trail:
                raise ValueError(f"conditions go in a circle: {' -> '.join([*trail[trail.index(name) :], name])}.")
            trail.append(name)
            for other in self.domains[name].when:
                visit(other)
            trail.pop()
            done.append(name)

        for name in self.domains:
            visit(name)
        return done

    def active(self, name: str, values: Mapping[str, Any]) -> bool:
        """Whether a hyperparameter applies with these values; it does not where one in its condition does not apply."""
        return all(
            other in values and values[other] in _as_list(condition)
            for other, condition in self.domains[name].when.items()
        )

    def suggested(self, trial: Any) -> dict[str, Any]:
        """Return the point that a trial of Optuna draws or proposes."""
        return self.visit(lambda name, domain: domain.suggest(trial, name))

    def visit(self, suggest: Any) -> dict[str, Any]:
        """Return a point whose values `suggest(name, domain)` chooses, each after those in its condition."""
        values = dict(self.fixed)
        for name in self._order():
            if self.active(name, values):
                values[name] = suggest(name, self.domains[name])
        return self.arranged(values)

    def arranged(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values in the order in which the space names them."""
        return {name: values[name] for name in (*self.domains, *self.fixed) if name in values}

    def grid(self) -> list[dict[str, Any]]:
        """Return every point; raise for a domain without an end."""
        order = self._order()
        lists = {name: self.domains[name].grid() for name in order}
        endless = [name for name in self.domains if lists[name] is None]
        if endless:
            raise ConfigError(
                [
                    f"{name} = {self.domains[name].kind}(...) has no end of values: search = 'grid' needs choice, "
                    "randint, qrandint or quniform."
                    for name in endless
                ]
            )
        points: list[dict[str, Any]] = []
        for combination in itertools.product(*(lists[name] or [] for name in order)):
            chosen = dict(zip(order, combination, strict=True))
            point = self.visit(lambda name, domain, chosen=chosen: chosen[name])
            if point not in points:
                points.append(point)
        return points

    def perturbed(
        self, params: Mapping[str, Any], rng: random.Random, names: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Return a point near this one, some of it drawn anew; `names`: what moves (default: all hyperparameters)."""
        moving = set(self.domains if names is None else names)
        fresh = random_trial(str(rng.random()))

        def near(name: str, domain: Domain) -> Any:
            if name not in params or (name in moving and rng.random() < _RESAMPLE_CHANCE):
                return domain.suggest(fresh, name)
            return domain.moved(params[name], rng) if name in moving else params[name]

        return self.visit(near)

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data, as in TOML."""
        return {**{name: domain.to_plain() for name, domain in self.domains.items()}, **self.fixed}


def _domain(entry: Mapping[str, Any]) -> Domain:
    """Read `{loguniform = [1e-4, 1e-1], when = {optimizer = "sgd"}}`."""
    when = entry.get("when", {})
    if not isinstance(when, Mapping):
        raise ValueError(f"when = {when!r} is not a condition: write when = {{ optimizer = 'sgd' }}")
    words = [word for word in entry if word != "when"]
    if len(words) != 1:
        raise ValueError(f"one word says what it may be ({', '.join(KINDS)}); got {', '.join(words) or 'none'}")
    word = words[0]
    if word == "grid_search":  # Ray's word
        word, entry = "choice", {"choice": entry["grid_search"]}
    if word not in KINDS:
        close = nearest(word, KINDS)
        guess = f"Did you mean '{close}'? " if close else ""
        raise ValueError(f"unknown word '{word}'. {guess}Allowed: {', '.join(KINDS)}")
    arguments = entry[word]
    if not isinstance(arguments, (list, tuple)):
        raise ValueError(f"{word} = {arguments!r}: write its arguments as a list ({KINDS[word].arguments})")
    return Domain(word, tuple(arguments), dict(when))


def _about_list(entry: Any, *, in_python: bool) -> str:
    """Return what to write in place of a list: a range where it is two numbers, else a choice."""
    values = list(entry)
    is_pair = len(values) == 2 and all(isinstance(value, (int, float)) for value in values) and values[0] < values[1]
    low_high = ", ".join(map(repr, values))
    choice = f"phalanx.tune.choice({values!r})" if in_python else f"{{ choice = {values!r} }}"
    kind = "loguniform" if is_pair and 0 < 10 * values[0] <= values[1] else "uniform"  # bounds of different sizes
    drawn = f"phalanx.tune.{kind}({low_high})" if in_python else f"{{ {kind} = [{low_high}] }}"
    type_name = type(entry).__name__
    return f"a {type_name} does not say how to draw from it: write {f'{drawn} for a range, or ' * is_pair}{choice}"


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


SEARCHES = ("random", "grid", "optuna")


class Search:
    """Random search. The same seed, number and known trials give the same point, in all searches."""

    learns = False
    """Whether a point depends on the results of earlier trials."""
    size: int | None = None
    """The number of points; None: unlimited."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        self._space, self._seed = space, seed

    def point(self, number: int, earlier: Sequence[Trial]) -> dict[str, Any]:
        """Return the point of a trial; `earlier`: the earlier trials with their results."""
        return self._space.suggested(random_trial(f"{self._seed}/{number}"))


class GridSearch(Search):
    """Every point once, in order."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        super().__init__(space, seed)
        self._points = space.grid()
        self.size = len(self._points)

    def point(self, number: int, earlier: Sequence[Trial]) -> dict[str, Any]:
        """Return the point with this number."""
        return self._points[number]


class PartOfSearch(Search):
    """Every n-th point of another search, for one of several jobs that share the work."""

    def __init__(self, whole: Search, index: int, count: int) -> None:
        self._search, self._index, self._count = whole, index, count

    def point(self, number: int, earlier: Sequence[Trial]) -> dict[str, Any]:
        """Return the point that the whole search has at this place."""
        return self._search.point(self._index + number * self._count, earlier)


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

    def point(self, number: int, earlier: Sequence[Trial]) -> dict[str, Any]:
        """Ask a new study that holds the known trials."""
        optuna = self._optuna
        seed = zlib.crc32(f"{self._seed}/{number}".encode())
        direction = "maximize" if self._objective.mode == "max" else "minimize"
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction=direction)
        study.add_trials([self._as_frozen(trial) for trial in earlier])
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
