"""The charts of a search: axes and lines as numbers, drawn as PNG files (`page` draws them on an HTML page)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.tools.tune.domains import Domain
from phalanx.tools.tune.objective import Objective
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.table import brief
from phalanx.tools.tune.trial import State, Trial

_BELOW = -0.08
_UNUSED = object()
"""Stands for the value of a hyperparameter that does not apply."""
PARALLEL_FILE, CURVES_FILE, PAGE_FILE = "parallel.png", "curves.png", "study.html"
_WORST, _BEST = (203, 213, 225), (13, 90, 120)


@dataclass(frozen=True)
class Axis:
    """One direction of a chart: positions of values between 0 and 1, and round values as labels."""

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    names: tuple[Any, ...] = ()
    """Choices, in order; empty for numbers."""
    optional: bool = False
    """Whether some trials do not have it: they pass below the axis."""
    whole: bool = False
    """Whether only whole numbers have a meaning."""

    @classmethod
    def of(cls, name: str, values: Iterable[float]) -> Axis:
        """Return the axis of these numbers, with a margin."""
        known = list(values)
        low, high = min(known, default=0.0), max(known, default=1.0)
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
        return cls(name, low - margin, high + margin, whole=all(isinstance(value, int) for value in known))

    def position(self, value: Any) -> float:
        """Return the position of a value."""
        if value is _UNUSED:
            return _BELOW
        if self.names:
            return ((self.names.index(value) if value in self.names else 0) + 0.5) / len(self.names)
        low, high, here = (math.log(n) if self.log else n for n in (self.low, self.high, value))
        return 0.5 if high == low else (here - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and their labels."""
        values = self.names or [float(value) for value in self._round() if self.low <= value <= self.high]
        found = [(self.position(value), brief(value)) for value in values]
        return found + ([(_BELOW, "unused")] if self.optional else [])

    def _round(self) -> list[float]:
        """Return about five round values."""
        if self.low == self.high:
            return [self.low]
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [10.0**power for power in powers]
            if sum(self.low <= value <= self.high for value in found) < 2:
                return [self.low, math.sqrt(self.low * self.high), self.high]
            return found
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
        step = max(1.0, step) if self.whole else step
        return [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


@dataclass(frozen=True)
class Line:
    """A trial in the charts."""

    trial: Trial
    value: float
    """Of the metric."""
    positions: tuple[float, ...]
    curve: tuple[tuple[int, float], ...]
    goodness: float
    """From 0, the worst, to 1, the best, by rank: so one outlier does not hide the other differences."""

    @property
    def color(self) -> str:
        """The better, the darker."""
        red, green, blue = (round(w + (b - w) * self.goodness) for w, b in zip(_WORST, _BEST, strict=True))
        return f"#{red:02x}{green:02x}{blue:02x}"


def axes_and_lines(trials: Sequence[Trial], space: SearchSpace, objective: Objective) -> tuple[list[Axis], list[Line]]:
    """Return the axes (hyperparameters, then the metric) and the trials that have a result, worst first."""
    ended = [trial for trial in trials if trial.state in (State.FINISHED, State.STOPPED)]
    measured = [(trial.value(objective), trial) for trial in ended]
    known = [(value, trial) for value, trial in measured if value is not None and math.isfinite(value)]
    numbers = [value for value, _ in known]
    axes = [_axis(name, domain) for name, domain in space.domains.items()]
    axes.append(Axis(objective.metric, min(numbers, default=0.0), max(numbers, default=1.0)))
    known.sort(key=lambda each: (objective.goodness(each[0]), -each[1].number))
    most = max(1, len(known) - 1)
    lines = []
    for rank, (value, trial) in enumerate(known):
        given = [trial.params.get(axis.name, _UNUSED) for axis in axes[:-1]]
        positions = tuple(axis.position(one) for axis, one in zip(axes, [*given, value], strict=True))
        lines.append(Line(trial, value, positions, tuple(trial.curve(objective)), rank / most))
    return axes, lines


def _axis(name: str, domain: Domain) -> Axis:
    if domain.kind == "choice":
        return Axis(name, names=tuple(dict.fromkeys(domain.arguments)), optional=bool(domain.when))
    return Axis(name, float(domain.low), float(domain.high), log=domain.meaning.log, optional=bool(domain.when))


def draw_pictures(axes: Sequence[Axis], lines: Sequence[Line], folder: Path) -> list[Path]:
    """Draw both charts as PNG files and return their paths."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "the PNG pictures need matplotlib, which is not installed", hint="Run: pip install 'phalanx[tune]'"
        ) from error
    matplotlib.use("agg", force=False)
    import matplotlib.pyplot as plt

    paths = [folder / PARALLEL_FILE, folder / CURVES_FILE]
    for path, width in zip(paths, (2.2 * len(axes) + 1.5, 7), strict=True):
        figure, plot = plt.subplots(figsize=(width, 4.2), layout="constrained")
        if path.name == PARALLEL_FILE:
            _draw_parallel(plot, axes, lines)
        else:
            _draw_curves(plot, axes[-1].name, lines)
        figure.savefig(path, dpi=130)
        plt.close(figure)
    return paths


def _draw_parallel(plot: Any, axes: Sequence[Axis], lines: Sequence[Line]) -> None:
    for line in lines:
        width = 2.5 if line.goodness == 1 else 1.0
        plot.plot(range(len(axes)), line.positions, color=line.color, linewidth=width)
    for number, axis in enumerate(axes):
        plot.plot((number, number), (0, 1), color="black", linewidth=0.8)
        for where, label in axis.ticks():
            plot.annotate(label, (number, where), xytext=(4, 0), textcoords="offset points", fontsize=7, va="center")
    plot.set_xticks(range(len(axes)), [axis.name for axis in axes])
    plot.set(yticks=[], ylim=(-0.12, 1.04), xlim=(-0.1, len(axes) - 0.6))
    for side in ("top", "left", "right", "bottom"):
        plot.spines[side].set_visible(False)


def _draw_curves(plot: Any, metric: str, lines: Sequence[Line]) -> None:
    for line in lines:
        if line.curve:
            best = line.goodness == 1
            label = f"trial {line.trial.number}, the best" if best else None
            plot.plot(*zip(*line.curve, strict=True), color=line.color, linewidth=2.5 if best else 1.0, label=label)
            if str(line.trial.state) == "stopped":
                plot.plot(*line.curve[-1], marker="x", color=line.color, markersize=5)
    plot.set(xlabel="iteration", ylabel=metric)
    plot.grid(visible=True, alpha=0.3)
    if any(line.curve and line.goodness == 1 for line in lines):
        plot.legend()
