"""The charts of a search: axes and lines as numbers, drawn as PNG files and on one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.tune.domains import Domain
from phalanx.tune.objective import Objective
from phalanx.tune.results import Results
from phalanx.tune.space import SearchSpace
from phalanx.tune.table import brief, columns, point_words, ranked
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


_HEIGHT, _LEFT, _TOP, _STRIDE = 300, 60, 30, 170

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b2733; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #e3e8ee; }
.failed td { color: #b42318; } .stopped td { color: #7a6a2f; }
svg { max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #445; }
path { fill: none; } path:hover { stroke: #d9480f; stroke-width: 3; }
.scroll { overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { background: #10161d; color: #dbe4ee; } svg { background: #fff; } }
"""


def page(results: Results, axes: Sequence[Axis], lines: Sequence[Line], title: str) -> str:
    """Return the HTML page of a search: both charts and every trial, without other files."""
    best = results.best
    head, rows = columns(ranked(results.trials, results.objective), results.objective)
    states = [str(trial.state) for trial in ranked(results.trials, results.objective)]
    failures = "".join(f"<li>trial {trial.number}: {escape(trial.cause)}</li>" for trial in results.failed)
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head>',
            f"<body><h1>{escape(title)}</h1>",
            f"<p>Best of {len(results.trials)} trials: trial {best.number}, {escape(results.objective.metric)} "
            f"<b>{brief(results.best_value)}</b> with {escape(point_words(best.params))}.</p>",
            "<h2>Hyperparameters</h2><p>Each line is a trial; darker is better. Point at a line to see its trial.</p>",
            f'<div class="scroll">{_parallel_svg(axes, lines)}</div>',
            "<h2>Learning curves</h2><p>A curve that ends with a cross belongs to a trial that was stopped early.</p>",
            _curves_svg(axes[-1].name, lines),
            "<h2>Trials</h2>",
            f'<div class="scroll">{_table(head, rows, states)}</div>',
            f"<h2>Failures</h2><ul>{failures}</ul>" if failures else "",
            "</body></html>\n",
        ]
    )


def _parallel_svg(axes: Sequence[Axis], lines: Sequence[Line]) -> str:
    width = _LEFT + _STRIDE * len(axes)
    parts = [f'<svg viewBox="0 0 {width} {_HEIGHT + 2 * _TOP + 10}" width="{width}" role="img">']
    for line in lines:
        points = [(_LEFT + _STRIDE * n, _down(where)) for n, where in enumerate(line.positions)]
        parts.append(_path(points, line))
    for number, axis in enumerate(axes):
        x = _LEFT + _STRIDE * number
        parts.append(f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{_TOP + _HEIGHT}" stroke="#334"/>')
        parts.append(f'<text x="{x}" y="{_TOP - 12}" text-anchor="middle">{escape(axis.name)}</text>')
        parts += [f'<text x="{x + 5}" y="{_down(w) + 4:.1f}">{escape(label)}</text>' for w, label in axis.ticks()]
    return "".join([*parts, "</svg>"])


def _curves_svg(metric: str, lines: Sequence[Line]) -> str:
    curves = [line for line in lines if line.curve]
    if not curves:
        return "<p>No trial reported the metric while it ran.</p>"
    width, last = 720, max(line.curve[-1][0] for line in curves)
    first = min(line.curve[0][0] for line in curves)
    values = [value for line in curves for _, value in line.curve]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def position(point: tuple[int, float]) -> tuple[float, float]:
        share = (point[0] - first) / max(1, last - first)
        return _LEFT + share * (width - 2 * _LEFT), _down((point[1] - low) / span)

    parts = [f'<svg viewBox="0 0 {width} {_HEIGHT + 2 * _TOP + 10}" width="{width}" role="img">']
    for line in curves:
        points = [position(point) for point in line.curve]
        parts.append(_path(points, line))
        if line.trial.state is State.STOPPED or len(points) == 1:
            x, y = points[-1]
            parts.append(f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">&#215;</text>')
    ticks = [(share, brief(low + span * share)) for share in (0.0, 0.5, 1.0)]
    parts += [f'<text x="4" y="{_down(share) + 4:.1f}">{label}</text>' for share, label in ticks]
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT + _TOP + 22}">{first}</text>')
    parts.append(f'<text x="{width - _LEFT}" y="{_HEIGHT + _TOP + 22}" text-anchor="end">{last} iterations</text>')
    parts.append(f'<text x="4" y="14">{escape(metric)}</text>')
    return "".join([*parts, "</svg>"])


def _down(share: float) -> float:
    return _TOP + (1 - share) * _HEIGHT


def _path(points: Sequence[tuple[float, float]], line: Line) -> str:
    course = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    width = 2.5 if line.goodness == 1 else 1.3
    title = escape(f"trial {line.trial.number}: {point_words(line.trial.params)}")
    return f'<path d="M{course}" stroke="{line.color}" stroke-width="{width}"><title>{title}</title></path>'


def _table(head: list[str], rows: list[list[str]], states: list[str]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f'<tr class="{state}">' + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row, state in zip(rows, states, strict=True)
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
