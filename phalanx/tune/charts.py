"""The charts of a search: axes and lines as numbers, drawn as PNG files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.tune.domains import Domain
from phalanx.tune.objective import Objective
from phalanx.tune.space import SearchSpace
from phalanx.tune.table import brief
from phalanx.tune.trial import State, Trial

_TICKS = 5
_BELOW = -0.08
UNUSED = object()
"""Stands for the value of a hyperparameter that does not apply."""
_WORST, _BEST = (203, 213, 225), (13, 90, 120)


@dataclass(frozen=True)
class Axis:
    """One upright axis: where values lie between 0 and 1, and what is written beside it."""

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    names: tuple[Any, ...] = ()
    """Choices, in order; empty for numbers."""
    optional: bool = False
    """Whether some trials do not have it: they pass below the axis."""

    def position(self, value: Any) -> float:
        """Return the place of a value."""
        if value is UNUSED:
            return _BELOW
        if self.names:
            place = self.names.index(value) if value in self.names else 0
            return (place + 0.5) / len(self.names)
        low, high, here = (math.log(n) if self.log else n for n in (self.low, self.high, value))
        return 0.5 if high == low else (here - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return places and their labels."""
        return self._values() + ([(_BELOW, "unused")] if self.optional else [])

    def _values(self) -> list[tuple[float, str]]:
        if self.names:
            return [((place + 0.5) / len(self.names), brief(name)) for place, name in enumerate(self.names)]
        shares = [place / (_TICKS - 1) for place in range(_TICKS)]
        if self.low == self.high:
            return [(0.5, brief(self.low))]
        if self.log:
            ratio = self.high / self.low
            return [(share, brief(float(self.low * ratio**share))) for share in shares]
        return [(share, brief(float(self.low + (self.high - self.low) * share))) for share in shares]


@dataclass(frozen=True)
class Line:
    """A trial in the pictures."""

    trial: Trial
    positions: tuple[float, ...]
    curve: tuple[tuple[int, float], ...]
    goodness: float
    """From 0, the worst, to 1, the best, by rank: one outlier does not wash out the rest."""

    @property
    def color(self) -> str:
        """The better, the darker."""
        red, green, blue = (round(w + (b - w) * self.goodness) for w, b in zip(_WORST, _BEST, strict=True))
        return f"#{red:02x}{green:02x}{blue:02x}"


def axes_and_lines(trials: Sequence[Trial], space: SearchSpace, objective: Objective) -> tuple[list[Axis], list[Line]]:
    """Return the axes (hyperparameters, then the metric) and the trials that have come to something, worst first."""
    shown = [
        trial
        for trial in trials
        if trial.state in (State.FINISHED, State.STOPPED) and math.isfinite(trial.value(objective) or math.nan)
    ]
    values = [trial.value(objective) for trial in shown]
    numbers = [value for value in values if value is not None]
    axes = [_axis(name, domain) for name, domain in space.domains.items()]
    axes.append(Axis(objective.metric, min(numbers, default=0.0), max(numbers, default=1.0)))
    ordered = sorted(shown, key=lambda trial: (objective.goodness(trial.value(objective)), -trial.number))
    most = max(1, len(ordered) - 1)
    return axes, [_line(trial, axes, objective, rank / most) for rank, trial in enumerate(ordered)]


def _axis(name: str, domain: Domain) -> Axis:
    if domain.kind == "choice":
        return Axis(name, names=tuple(dict.fromkeys(domain.arguments)), optional=bool(domain.when))
    return Axis(name, float(domain.low), float(domain.high), log=domain.meaning.log, optional=bool(domain.when))


def _line(trial: Trial, axes: list[Axis], objective: Objective, goodness: float) -> Line:
    places = [axis.position(trial.params.get(axis.name, UNUSED)) for axis in axes[:-1]]
    places.append(axes[-1].position(trial.value(objective)))
    return Line(trial, tuple(places), tuple(trial.curve(objective)), goodness)


PARALLEL_FILE = "parallel.png"
CURVES_FILE = "curves.png"


def draw_pictures(axes: Sequence[Axis], lines: Sequence[Line], folder: Path) -> list[Path]:
    """Draw both pictures and return where they are."""
    plt = _pyplot()
    figure, place = plt.subplots(figsize=(2.2 * len(axes) + 1.5, 4.2), layout="constrained")
    draw_parallel(place, axes, lines)
    paths = [_save(plt, figure, folder / PARALLEL_FILE)]
    figure, place = plt.subplots(figsize=(7, 4.2), layout="constrained")
    draw_curves(place, axes[-1].name, lines)
    return [*paths, _save(plt, figure, folder / CURVES_FILE)]


def draw_parallel(place: Any, axes: Sequence[Axis], lines: Sequence[Line]) -> None:
    """Draw a line a trial across one upright axis a hyperparameter."""
    for line in lines:
        width = 2.5 if line.goodness == 1 else 1.0
        place.plot(range(len(axes)), line.positions, color=line.color, linewidth=width)
    for number, axis in enumerate(axes):
        place.plot((number, number), (0, 1), color="black", linewidth=0.8)
        for where, label in axis.ticks():
            place.annotate(label, (number, where), xytext=(4, 0), textcoords="offset points", fontsize=7, va="center")
    place.set_xticks(range(len(axes)), [axis.name for axis in axes])
    place.set(yticks=[], ylim=(-0.12, 1.04), xlim=(-0.1, len(axes) - 0.6))
    for side in ("top", "left", "right", "bottom"):
        place.spines[side].set_visible(False)


def draw_curves(place: Any, metric: str, lines: Sequence[Line]) -> None:
    """Draw the metric over iterations; a curve that ends early was given up there."""
    for line in lines:
        if line.curve:
            best = line.goodness == 1
            label = f"trial {line.trial.number}, the best" if best else None
            place.plot(*zip(*line.curve, strict=True), color=line.color, linewidth=2.5 if best else 1.0, label=label)
            if str(line.trial.state) == "stopped":
                place.plot(*line.curve[-1], marker="x", color=line.color, markersize=5)
    place.set(xlabel="iteration", ylabel=metric)
    place.grid(visible=True, alpha=0.3)
    if any(line.curve and line.goodness == 1 for line in lines):
        place.legend()


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "the PNG pictures need matplotlib, which is not installed", hint="Run: pip install 'phalanx[tune]'"
        ) from error
    matplotlib.use("agg", force=False)
    import matplotlib.pyplot as plt

    return plt
