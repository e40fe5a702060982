"""`study.html`: a search on one self-contained page: history, importance, slices, coordinates, curves, trials."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.tools.tune.charts import Axis, Line
from phalanx.tools.tune.objective import Objective
from phalanx.tools.tune.results import Results
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.suggest import distribution, import_optuna, stored
from phalanx.tools.tune.table import brief, columns, point_words, ranked
from phalanx.tools.tune.trial import State

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 40
_STRIDE = 190
_COMPARED = 4
"""Trials that importance needs: fewer say nothing."""

_STYLE = """
:root { --ink: #1b2733; --soft: #5b6b7b; --grid: #e3e8ee; --paper: #fff; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); }
h2 { margin: 2.2rem 0 .3rem; } p { margin: .3rem 0 .8rem; color: var(--soft); }
code, .facts dd { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } .facts dd { margin: 0; }
.best { font-size: 1.15rem; color: var(--ink); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { cursor: pointer; user-select: none; } th[aria-sort=ascending]::after { content: " \\25b4"; }
th[aria-sort=descending]::after { content: " \\25be"; }
.failed td { color: #b42318; } .stopped td { color: #8a6d1f; }
.scroll { overflow-x: auto; } .row { display: flex; flex-wrap: wrap; gap: 1rem; }
svg { max-width: none; } svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .name { fill: var(--ink); font-weight: 600; }
svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); }
.line { fill: none; } .mark:hover, .line:hover { stroke: #d9480f; stroke-width: 4; }
@media (prefers-color-scheme: dark) { :root { --ink: #dbe4ee; --soft: #94a3b3; --grid: #263341; --paper: #10161d; } }
"""
_SCRIPT = """
for (const th of document.querySelectorAll("th")) th.onclick = () => {
  const body = th.closest("table").tBodies[0], at = th.cellIndex, up = th.ariaSort !== "ascending";
  for (const other of th.parentNode.children) other.ariaSort = null;
  th.ariaSort = up ? "ascending" : "descending";
  const value = row => row.cells[at].dataset.value ?? row.cells[at].textContent;
  const compare = (a, b) => { const x = value(a), y = value(b);
    if (x === "" || y === "") return (x === "") - (y === "");
    const d = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y; return up ? d : -d; };
  body.append(...[...body.rows].sort(compare));
};
"""


class Plot:
    """An SVG plot with axes, grid and labels; what is drawn in it is added as marks and lines."""

    def __init__(self, x: Axis, y: Axis, size: tuple[int, int]) -> None:
        self._x, self._y, self._width, self._height = x, y, *size
        self._parts = [f'<svg viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}" role="img">']
        bottom, right = self._height - _BOTTOM, self._width - _RIGHT
        for share, label in y.ticks():
            at = self._down(share)
            self._parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
            self._parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        for share, label in x.ticks():
            at = self._across(share)
            self._parts.append(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>')
            self._parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(label)}</text>')
        self._parts.append(f'<path class="axis line" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
        middle = (_LEFT + right) / 2
        self._parts.append(
            f'<text class="name" x="{middle}" y="{self._height - 6}" text-anchor="middle">{escape(x.name)}</text>'
            f'<text class="name" transform="translate(13 {(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
            f"{escape(y.name)}</text>"
        )

    def _across(self, share: float) -> float:
        return _LEFT + share * (self._width - _LEFT - _RIGHT)

    def _down(self, share: float) -> float:
        return _TOP + (1 - share) * (self._height - _TOP - _BOTTOM)

    def _at(self, point: tuple[Any, float]) -> tuple[float, float]:
        return self._across(self._x.position(point[0])), self._down(self._y.position(point[1]))

    def mark(self, point: tuple[Any, float], color: str, title: str, sign: str = "o") -> None:
        """Add a dot, or a cross."""
        x, y = self._at(point)
        shape = f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}">'
        if sign == "x":
            d = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
            shape = f'<path class="mark" d="{d}" stroke="{color}" stroke-width="2">'
        self._parts.append(f"{shape}<title>{escape(title)}</title>{'</path>' if sign == 'x' else '</circle>'}")

    def line(self, points: Sequence[tuple[float, float]], color: str, title: str, width: float = 1.5) -> None:
        """Add a line through points."""
        course = " L".join(f"{x:.1f} {y:.1f}" for x, y in map(self._at, points))
        look = f'stroke="{color}" stroke-width="{width}"'
        self._parts.append(f'<path class="line" d="M{course}" {look}><title>{escape(title)}</title></path>')

    def svg(self) -> str:
        """Return the plot."""
        return "".join([*self._parts, "</svg>"])


def command_words() -> str:
    """Return the command of this process, as it can be pasted."""
    words = sys.argv or [""]
    return shlex.join([os.path.basename(words[0]), *words[1:]])


def page(
    results: Results,
    space: SearchSpace,
    axes: Sequence[Axis],
    lines: Sequence[Line],
    title: str,
    facts: Mapping[str, str],
) -> str:
    """Return the HTML page of a search, without other files; `facts`: what the head of the page lists."""
    best = results.best
    failures = "".join(f"<li>trial {trial.number}: {escape(trial.cause)}</li>" for trial in results.failed)
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>",
        f"<body><h1>{escape(title)}</h1>",
        f'<p class="best">Best of {len(results.trials)} trials: trial {best.number}, '
        f"{escape(results.objective.metric)} <b>{brief(results.best_value)}</b> with "
        f"{escape(point_words(best.params))}.</p>",
        f'<dl class="facts">{listed}</dl>',
        *_section("History", "Each dot is a trial; the line is the best so far.", _history(results.objective, lines)),
        *_section("Importance", "How much each hyperparameter explains of the metric.", _importance(results, space)),
        *_section("Each hyperparameter", "The metric over one hyperparameter at a time.", _slices(axes, lines)),
        *_section(
            "All hyperparameters", "Each line is a trial; darker is better. Point at a line.", _parallel(axes, lines)
        ),
        *_section("Learning curves", "A cross: the trial was stopped early.", _curves(axes[-1].name, lines)),
        *_section("Trials", "Click on a head to sort.", _trials(results)),
        f"<h2>Failures</h2><ul>{failures}</ul>" if failures else "",
        f"<script>{_SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _section(name: str, text: str, content: str) -> list[str]:
    return [f"<h2>{name}</h2><p>{text}</p>", f'<div class="scroll">{content}</div>'] if content else []


def _words(line: Line) -> str:
    return f"trial {line.trial.number}: {point_words(line.trial.params)}"


def _history(objective: Objective, lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    ordered = sorted(lines, key=lambda each: each.trial.number)
    numbers = Axis.of("trial", (line.trial.number for line in ordered))
    plot = Plot(numbers, Axis.of(objective.metric, (line.value for line in ordered)), (720, 300))
    course, so_far = [], ordered[0].value
    for line in ordered:
        better = max(so_far, line.value) if objective.mode == "max" else min(so_far, line.value)
        course += [(line.trial.number, so_far), (line.trial.number, better)]
        so_far = better
    plot.line(course, "#d9480f", "best so far", 2)
    for line in ordered:
        sign = "x" if line.trial.state is State.STOPPED else "o"
        plot.mark((line.trial.number, line.value), line.color, f"{_words(line)}: {brief(line.value)}", sign)
    return plot.svg()


def _importance(results: Results, space: SearchSpace) -> str:
    """Return bars of Optuna's importance (PED-ANOVA); empty where Optuna or enough trials are missing."""
    shares = importances(results, space)
    if not shares:
        return ""
    parts = [f'<svg viewBox="0 0 560 {28 * len(shares) + 6}" width="560" height="{28 * len(shares) + 6}" role="img">']
    for row, (name, share) in enumerate(shares.items()):
        y = 28 * row + 4
        parts.append(f'<text class="name" x="190" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="200" y="{y}" width="{300 * share:.1f}" height="20" fill="#0d5a78"/>')
        parts.append(f'<text x="{206 + 300 * share:.1f}" y="{y + 15}">{share:.0%}</text>')
    return "".join([*parts, "</svg>"])


def importances(results: Results, space: SearchSpace) -> dict[str, float]:
    """Return the share of each hyperparameter that all trials have, the most important first; empty if unknown."""
    try:
        optuna = import_optuna("importance")
    except UsageError:
        return {}
    objective = results.objective
    named = {name: domain for name, domain in space.domains.items() if not domain.when}
    study = optuna.create_study(direction="maximize" if objective.mode == "max" else "minimize")
    for trial in results.trials:
        value = trial.value(objective)
        if (
            trial.state is State.FINISHED
            and value is not None
            and math.isfinite(value)
            and named.keys() <= trial.params.keys()
        ):
            params = {name: stored(domain, trial.params[name]) for name, domain in named.items()}
            kinds = {name: distribution(domain) for name, domain in named.items()}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=value))
    if len(study.trials) < _COMPARED or len(named) < 2:
        return {}
    found = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    shares = {name: float(share) for name, share in found.items() if math.isfinite(share)}
    return shares if sum(shares.values()) > 0 else {}


def _slices(axes: Sequence[Axis], lines: Sequence[Line]) -> str:
    plots = []
    for axis in axes[:-1]:
        have = [line for line in lines if axis.name in line.trial.params]
        if have:
            metric = Axis.of(axes[-1].name, (line.value for line in lines))
            plot = Plot(replace(axis, optional=False), metric, (360, 260))
            for line in have:
                plot.mark((line.trial.params[axis.name], line.value), line.color, _words(line))
            plots.append(plot.svg())
    return f'<div class="row">{"".join(plots)}</div>' if plots else ""


def _parallel(axes: Sequence[Axis], lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    height, top = 300, 40
    width = 2 * _LEFT + _STRIDE * (len(axes) - 1) + 60

    def down(share: float) -> float:
        return top + (1 - share) * height

    parts = [f'<svg viewBox="0 0 {width} {height + 2 * top}" width="{width}" height="{height + 2 * top}" role="img">']
    for line in lines:
        course = " L".join(f"{_LEFT + _STRIDE * n} {down(where):.1f}" for n, where in enumerate(line.positions))
        thick = 3 if line.goodness == 1 else 1.5
        look = f'stroke="{line.color}" stroke-width="{thick}"'
        parts.append(f'<path class="line" d="M{course}" {look}><title>{escape(_words(line))}</title></path>')
    for number, axis in enumerate(axes):
        x = _LEFT + _STRIDE * number
        parts.append(f'<line class="axis" x1="{x}" y1="{top}" x2="{x}" y2="{top + height}"/>')
        parts.append(f'<text class="name" x="{x}" y="{top - 16}" text-anchor="middle">{escape(axis.name)}</text>')
        for share, label in axis.ticks():
            y = down(share)
            parts.append(f'<line class="axis" x1="{x - 3}" y1="{y:.1f}" x2="{x + 3}" y2="{y:.1f}"/>')
            parts.append(f'<text class="halo" x="{x + 7}" y="{y + 4:.1f}">{escape(label)}</text>')
    return "".join([*parts, "</svg>"])


def _curves(metric: str, lines: Sequence[Line]) -> str:
    curves = [line for line in lines if line.curve]
    if not curves:
        return "<p>No trial reported the metric while it ran.</p>"
    points = [point for line in curves for point in line.curve]
    x = Axis.of("iteration", (iteration for iteration, _ in points))
    plot = Plot(x, Axis.of(metric, (value for _, value in points)), (720, 320))
    for line in curves:
        plot.line(line.curve, line.color, _words(line), 3 if line.goodness == 1 else 1.5)
        if line.trial.state is State.STOPPED or len(line.curve) == 1:
            plot.mark(line.curve[-1], line.color, _words(line), "x" if line.trial.state is State.STOPPED else "o")
    return plot.svg()


def _trials(results: Results) -> str:
    trials = ranked(results.trials, results.objective)
    head, rows = columns(trials, results.objective)
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in [*head, "files"])
    body = []
    for trial, row in zip(trials, rows, strict=True):
        exact: dict[str, Any] = {"time": trial.seconds, results.objective.metric: trial.value(results.objective)}
        exact |= {name: value for name, value in trial.params.items() if isinstance(value, float)}
        data = [f' data-value="{exact[n]}"' if exact.get(n) is not None else "" for n in head]
        columns_ = "".join(f"<td{value}>{escape(cell)}</td>" for cell, value in zip(row, data, strict=True))
        body.append(f'<tr class="{trial.state}">{columns_}<td>{_links(trial.folder, results.folder)}</td></tr>')
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _links(folder: Path, root: Path) -> str:
    """Return links to a trial's files that exist."""
    found = [(name, folder / name) for name in ("logs", "config.toml", "events.jsonl")]
    relative = [(name, os.path.relpath(path, root)) for name, path in found if path.exists()]
    return " ".join(f'<a href="{escape(path)}">{escape(name)}</a>' for name, path in relative)
