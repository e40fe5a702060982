"""The domains of a search space: distributions of Optuna under one word each; Ray Tune's are converted."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.errors import UsageError


class Kind(NamedTuple):
    """The properties of a kind of domain."""

    arguments: str
    integer: bool = False
    log: bool = False
    step: bool = False


KINDS = {
    "choice": Kind("a list of values"),
    "uniform": Kind("low, high"),
    "loguniform": Kind("low, high", log=True),
    "quniform": Kind("low, high, step", step=True),
    "qloguniform": Kind("low, high, step", log=True, step=True),
    "randint": Kind("low, high", integer=True),
    "lograndint": Kind("low, high", integer=True, log=True),
    "qrandint": Kind("low, high, step", integer=True, step=True),
    "qlograndint": Kind("low, high, step", integer=True, log=True, step=True),
}
"""Bounds belong to the range, also those of whole numbers."""

_MOST_GRID_VALUES = 1000
_FACTORS = (0.8, 1.2)


@dataclass(frozen=True)
class Domain:
    """The values of one hyperparameter: a kind, its arguments, and when it applies."""

    kind: str
    arguments: tuple[Any, ...]
    when: Mapping[str, Any] = field(default_factory=dict)
    """Names of other hyperparameters and the value, or list of values, at which this one applies."""

    @property
    def meaning(self) -> Kind:
        """The properties of the kind."""
        return KINDS[self.kind]

    @property
    def low(self) -> Any:
        """The lower bound."""
        return self.arguments[0]

    @property
    def high(self) -> Any:
        """The upper bound."""
        return self.arguments[1]

    @property
    def step(self) -> Any:
        """The distance between values, where there is one."""
        return self.arguments[2] if self.meaning.step else 1 if self.meaning.integer else None

    def mistakes(self) -> list[str]:
        """Return what is wrong with the arguments."""
        if self.kind == "choice":
            return [] if self.arguments else ["choice of nothing: give at least one value"]
        expected = 3 if self.meaning.step else 2
        if len(self.arguments) != expected:
            return [f"{self.kind} takes {self.meaning.arguments}; got {len(self.arguments)} values"]
        wrong = [value for value in self.arguments if not _is_number(value, whole=self.meaning.integer)]
        if wrong:
            number = "whole numbers" if self.meaning.integer else "finite numbers"
            return [f"{self.kind} takes {number}; got {', '.join(map(repr, wrong))}"]
        return self._range_mistakes()

    def _range_mistakes(self) -> list[str]:
        mistakes = []
        if self.low > self.high:
            ordered = ", ".join(map(str, (self.high, self.low, *self.arguments[2:])))
            mistakes.append(
                f"the bounds are reversed: write {self.kind} = [{ordered}], or {self.kind}({ordered}) in Python"
            )
        if self.meaning.log and self.low <= 0:
            mistakes.append(f"{self.kind} needs bounds above 0; got {self.low}")
        if self.meaning.step and self.step <= 0:
            mistakes.append(f"the step must be above 0; got {self.step}")
        elif self.meaning.step and self.high > self.low and self.step > self.high - self.low:
            mistakes.append(f"the step {self.step} is larger than the range from {self.low} to {self.high}")
        return mistakes

    def grid(self) -> list[Any] | None:
        """Return every value, or None where there are too many."""
        if self.kind == "choice":
            return list(self.arguments)
        if self.step is None or self.meaning.log or (self.high - self.low) / self.step >= _MOST_GRID_VALUES:
            return None
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return [self.snap(self.low + index * self.step) for index in range(count)]

    def distribution(self) -> Any:
        """Return it as a distribution of Optuna."""
        from optuna import distributions

        if self.kind == "choice":
            return distributions.CategoricalDistribution(tuple(map(self.stored, self.arguments)))
        kind = distributions.IntDistribution if self.meaning.integer else distributions.FloatDistribution
        if self.meaning.log:  # Optuna has no steps on a logarithm: the value is rounded afterwards
            return kind(self.low, self.high, log=True)
        last = self.high
        if self.step is not None:  # Optuna warns of a range that is not a multiple of the step
            last = self.low + math.floor((self.high - self.low) / self.step + 1e-9) * self.step
            last = last if self.meaning.integer else round(last, 12)
        return kind(self.low, last, step=self.step)

    def stored(self, value: Any) -> Any:
        """Return a value as Optuna's storage can hold it: a choice that is neither number nor text by its repr."""
        plain = self.kind != "choice" or value is None or isinstance(value, (bool, int, float, str))
        return value if plain else repr(value)

    def restored(self, value: Any) -> Any:
        """Return the value of the domain that is stored like this."""
        if self.kind != "choice":
            return self.snap(value)
        return next((one for one in self.arguments if self.stored(one) == value), value)

    def suggest(self, trial: Any, name: str) -> Any:
        """Return the value that a trial of Optuna draws or proposes."""
        distribution = self.distribution()
        if self.kind == "choice":
            return self.restored(trial.suggest_categorical(name, distribution.choices))
        ask = trial.suggest_int if self.meaning.integer else trial.suggest_float
        return self.restored(
            ask(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
        )

    def snap(self, value: float) -> Any:
        """Return the nearest value that the domain has."""
        if self.step is not None:
            # Multiples count from the lower bound; with a logarithm they count from zero, or few would be round.
            start = 0 if self.meaning.log else self.low
            value = start + round((value - start) / self.step) * self.step
            value = round(value, 12) if not self.meaning.integer else value
        value = min(max(value, self.low), self.high)
        return int(value) if self.meaning.integer else float(value)

    def moved(self, value: Any, rng: random.Random) -> Any:
        """Return another value near this one (population-based training)."""
        if self.kind == "choice":
            index = self.arguments.index(value) if value in self.arguments else 0
            return self.arguments[min(max(index + rng.choice((-1, 1)), 0), len(self.arguments) - 1)]
        factor = rng.choice(_FACTORS)
        moved = self.snap(value * factor)
        if moved == value and self.step is not None:  # a small whole number would never move
            moved = self.snap(value + math.copysign(self.step, factor - 1))
        return moved

    def to_plain(self) -> dict[str, Any]:
        """Return it as a TOML table."""
        return {self.kind: list(self.arguments), **({"when": dict(self.when)} if self.when else {})}


def _is_number(value: Any, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) if whole else math.isfinite(value)


def choice(values: Sequence[Any], *, when: Mapping[str, Any] | None = None) -> Domain:
    """One of these values."""
    return Domain("choice", tuple(values), when or {})


def uniform(low: float, high: float, *, when: Mapping[str, Any] | None = None) -> Domain:
    """Any number from low to high."""
    return Domain("uniform", (low, high), when or {})


def loguniform(low: float, high: float, *, when: Mapping[str, Any] | None = None) -> Domain:
    """Any number from low to high, each order of magnitude as likely as another."""
    return Domain("loguniform", (low, high), when or {})


def quniform(low: float, high: float, step: float, *, when: Mapping[str, Any] | None = None) -> Domain:
    """A number from low to high in steps."""
    return Domain("quniform", (low, high, step), when or {})


def qloguniform(low: float, high: float, step: float, *, when: Mapping[str, Any] | None = None) -> Domain:
    """A multiple of step from low to high, each order of magnitude as likely as another."""
    return Domain("qloguniform", (low, high, step), when or {})


def randint(low: int, high: int, *, when: Mapping[str, Any] | None = None) -> Domain:
    """A whole number from low to high; both belong to it."""
    return Domain("randint", (low, high), when or {})


def lograndint(low: int, high: int, *, when: Mapping[str, Any] | None = None) -> Domain:
    """A whole number from low to high, each order of magnitude as likely as another."""
    return Domain("lograndint", (low, high), when or {})


def qrandint(low: int, high: int, step: int, *, when: Mapping[str, Any] | None = None) -> Domain:
    """A whole number from low to high in steps."""
    return Domain("qrandint", (low, high, step), when or {})


def qlograndint(low: int, high: int, step: int, *, when: Mapping[str, Any] | None = None) -> Domain:
    """A multiple of step from low to high, each order of magnitude as likely as another."""
    return Domain("qlograndint", (low, high, step), when or {})


def import_optuna(who: str) -> Any:
    """Import Optuna with few log messages, or raise with the command that installs it."""
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            f"{who} needs Optuna, which is not installed", hint="Run: pip install 'phalanx[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def random_trial(seed: str) -> Any:
    """Return a trial of Optuna that draws at random; the same seed draws the same."""
    optuna = import_optuna("tuning")
    sampler = optuna.samplers.RandomSampler(seed=zlib.crc32(seed.encode()))
    return optuna.create_study(sampler=sampler).ask()


def is_rays(entry: Any) -> bool:
    """Whether this is a domain of Ray Tune, such as `ray.tune.loguniform(1e-4, 1e-1)`."""
    return type(entry).__module__ == "ray.tune.search.sample"


def from_ray(domain: Any) -> Domain:
    """Return Ray's domain as one of this module; ValueError where there is no such kind."""
    name = type(domain).__name__
    if name == "Categorical":
        return Domain("choice", tuple(domain.categories))
    sampler = domain.get_sampler()
    step = None
    if type(sampler).__name__ == "Quantized":
        step, sampler = sampler.q, sampler.get_sampler()
    integer, log = name == "Integer", type(sampler).__name__.lstrip("_") == "LogUniform"
    if name not in ("Integer", "Float") or type(sampler).__name__.lstrip("_") not in ("Uniform", "LogUniform"):
        raise ValueError(
            f"Ray's {domain!r} has no word here: use choice, uniform, loguniform, randint or their q forms"
        )
    # Ray's whole numbers end before the upper bound, except in steps.
    high = domain.upper - 1 if integer and step is None else domain.upper
    word = "q" * (step is not None) + "log" * log + ("randint" if integer else "uniform")
    return Domain(word, (domain.lower, high) if step is None else (domain.lower, high, step))
