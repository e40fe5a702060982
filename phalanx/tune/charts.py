"""The charts of a search: axes and lines as numbers, drawn as PNG files (`page` draws them on an HTML page)."""

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
_UNUSED = object()
"""Stands for the value of a hyperparameter that does not apply."""
PARALLEL_FILE, CURVES_FILE, PAGE_FILE = "parallel.png", "curves.png", "study.html"
_WORST, _BEST = (203, 213, 225), (13, 90, 120)


@dataclass(frozen=True)
class Axis:
    """A vertical axis: positions of values between 0 and 1, and their labels."""

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    names: tuple[Any, ...] = ()
    """Choices, in order; empty for numbers."""
    optional: bool = False
    """Whether some trials do not have it: they pass below the axis."""

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
        if self.names:
            values = [((n + 0.5) / len(self.names), brief(name)) for n, name in enumerate(self.names)]
        elif self.low == self.high:
            values = [(0.5, brief(self.low))]
        else:
            shares = [n / (_TICKS - 1) for n in range(_TICKS)]
            ratio, span = self.high / self.low if self.log else 1.0, self.high - self.low
            values = [(s, brief(float(self.low * ratio**s if self.log else self.low + span * s))) for s in shares]
        return values + ([(_BELOW, "unused")] if self.optional else [])


@dataclass(frozen=True)
class Line:
    """A trial in the charts."""

    trial: Trial
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
    shown = [
        trial
        for trial in trials
        if trial.state in (State.FINISHED, State.STOPPED) and math.isfinite(trial.value(objective) or math.nan)
    ]
    numbers = [value for trial in shown if (value := trial.value(objective)) is not None]
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
    positions = [axis.position(trial.params.get(axis.name, _UNUSED)) for axis in axes[:-1]]
    positions.append(axes[-1].position(trial.value(objective)))
    return Line(trial, tuple(positions), tuple(trial.curve(objective)), goodness)


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
