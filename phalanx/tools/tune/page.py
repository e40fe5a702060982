"""`study.html`: a search on one self-contained page: history, importance, slices, coordinates, curves, trials."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.tools.svg import UNUSED, Axis, Plot, bars, brief, drawing, html_page
from phalanx.tools.tune.domains import Domain, import_optuna
from phalanx.tools.tune.results import Results, columns, point_words, ranked
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.trial import Objective, State, Trial

PAGE_FILE = "study.html"
_LEFT, _STRIDE = 64, 190
_WORST, _BEST = (203, 213, 225), (13, 90, 120)
_COMPARED = 4
"""Trials that importance needs: fewer say nothing."""

_STYLE = """
body { max-width: none; margin: 1.5rem 2rem; padding: 0; }
.scroll > svg { width: 100%; height: auto; max-height: 26rem; }
.parts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 0 2rem; }
.parts > section { min-width: 0; } table { width: 100%; } a { color: #0f8f83; text-decoration: none; }
p { color: var(--soft); } code, .facts dd { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } .facts dd { margin: 0; }
.big { color: var(--ink); } th, td { white-space: nowrap; }
th { cursor: pointer; user-select: none; } th[aria-sort=ascending]::after { content: " \\25b4"; }
th[aria-sort=descending]::after { content: " \\25be"; }
.failed td { color: #b42318; } .stopped td { color: #8a6d1f; } .row { display: flex; flex-wrap: wrap; gap: 1rem; }
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
    results = [(value, trial) for value, trial in measured if value is not None and math.isfinite(value)]
    numbers = [value for value, _ in results]
    axes = [_axis(name, domain) for name, domain in space.domains.items()]
    axes.append(Axis(objective.metric, min(numbers, default=0.0), max(numbers, default=1.0)))
    results.sort(key=lambda pair: (objective.goodness(pair[0]), -pair[1].number))
    most = max(1, len(results) - 1)
    lines = []
    for rank, (value, trial) in enumerate(results):
        params = [trial.params.get(axis.name, UNUSED) for axis in axes[:-1]]
        positions = tuple(axis.position(one) for axis, one in zip(axes, [*params, value], strict=True))
        lines.append(Line(trial, value, positions, tuple(trial.curve(objective)), rank / most))
    return axes, lines


def _axis(name: str, domain: Domain) -> Axis:
    if domain.kind == "choice":
        return Axis(name, names=tuple(dict.fromkeys(domain.arguments)), optional=bool(domain.when))
    return Axis(name, float(domain.low), float(domain.high), log=domain.meaning.log, optional=bool(domain.when))


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
        f'<p class="big">Best of {len(results.trials)} trials: trial {best.number}, '
        f"{escape(results.objective.metric)} <b>{brief(results.best_value)}</b> with "
        f"{escape(point_words(best.params))}.</p>",
        f'<dl class="facts">{listed}</dl><div class="parts">',
        *_section("History", "Each dot is a trial; the line is the best so far.", _history(results.objective, lines)),
        *_section("Importance", "How much each hyperparameter explains of the metric.", _importance(results, space)),
        *_section("Each hyperparameter", "The metric over one hyperparameter at a time.", _slices(axes, lines)),
        *_section(
            "All hyperparameters", "Each line is a trial; darker is better. Point at a line.", _parallel(axes, lines)
        ),
        *_section("Learning curves", "A cross: the trial was stopped early.", _curves(axes[-1].name, lines)),
        "</div>",
        *_section("Trials", "Click on a head to sort. A number leads to the trial's run.", _trials(results)),
        f"<h2>Failures</h2><ul>{failures}</ul>" if failures else "",
        f"<script>{_SCRIPT}</script>",
    ]
    return html_page(title, parts, _STYLE)


def _section(name: str, text: str, content: str) -> list[str]:
    part = f'<section><h2>{name}</h2><p>{text}</p><div class="scroll">{content}</div></section>'
    return [part] if content else []


def _title(line: Line) -> str:
    return f"trial {line.trial.number}: {point_words(line.trial.params)}"


def _history(objective: Objective, lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    ordered = sorted(lines, key=lambda item: item.trial.number)
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
        plot.mark((line.trial.number, line.value), line.color, f"{_title(line)}: {brief(line.value)}", sign)
    return plot.svg()


def _importance(results: Results, space: SearchSpace) -> str:
    """Return bars of Optuna's importance (PED-ANOVA); empty where Optuna or enough trials are missing."""
    shares = importances(results, space)
    return bars(shares) if shares else ""


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
            params = {name: domain.stored(trial.params[name]) for name, domain in named.items()}
            kinds = {name: domain.distribution() for name, domain in named.items()}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=value))
    if len(study.trials) < _COMPARED or len(named) < 2:
        return {}
    importance_of = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
    )
    shares = {name: float(share) for name, share in importance_of.items() if math.isfinite(share)}
    return shares if sum(shares.values()) > 0 else {}


def _slices(axes: Sequence[Axis], lines: Sequence[Line]) -> str:
    plots = []
    for axis in axes[:-1]:
        have = [line for line in lines if axis.name in line.trial.params]
        if have:
            metric = Axis.of(axes[-1].name, (line.value for line in lines))
            plot = Plot(replace(axis, optional=False), metric, (360, 260))
            for line in have:
                plot.mark((line.trial.params[axis.name], line.value), line.color, _title(line))
            plots.append(plot.svg())
    return f'<div class="row">{"".join(plots)}</div>' if plots else ""


def _parallel(axes: Sequence[Axis], lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    height, top = 300, 40
    width = 2 * _LEFT + _STRIDE * (len(axes) - 1) + 60

    def down(share: float) -> float:
        return top + (1 - share) * height

    parts = []
    for line in lines:
        course = " L".join(f"{_LEFT + _STRIDE * n} {down(where):.1f}" for n, where in enumerate(line.positions))
        thick = 3 if line.goodness == 1 else 1.5
        look = f'stroke="{line.color}" stroke-width="{thick}"'
        parts.append(f'<path class="line" d="M{course}" {look}><title>{escape(_title(line))}</title></path>')
    for number, axis in enumerate(axes):
        x = _LEFT + _STRIDE * number
        parts.append(f'<line class="axis" x1="{x}" y1="{top}" x2="{x}" y2="{top + height}"/>')
        parts.append(f'<text class="name" x="{x}" y="{top - 16}" text-anchor="middle">{escape(axis.name)}</text>')
        for share, label in axis.ticks():
            y = down(share)
            parts.append(f'<line class="axis" x1="{x - 3}" y1="{y:.1f}" x2="{x + 3}" y2="{y:.1f}"/>')
            parts.append(f'<text class="halo" x="{x + 7}" y="{y + 4:.1f}">{escape(label)}</text>')
    return drawing((width, height + 2 * top), parts)


def _curves(metric: str, lines: Sequence[Line]) -> str:
    curves = [line for line in lines if line.curve]
    if not curves:
        return "<p>No trial reported the metric while it ran.</p>"
    points = [point for line in curves for point in line.curve]
    x = Axis.of("iteration", (iteration for iteration, _ in points))
    plot = Plot(x, Axis.of(metric, (value for _, value in points)), (720, 320))
    for line in curves:
        plot.line(line.curve, line.color, _title(line), 3 if line.goodness == 1 else 1.5)
        if line.trial.state is State.STOPPED or len(line.curve) == 1:
            plot.mark(line.curve[-1], line.color, _title(line), "x" if line.trial.state is State.STOPPED else "o")
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
        run = escape(os.path.relpath(trial.folder, results.folder))
        linked = [f'<a href="{run}">{escape(row[0])}</a>', *map(escape, row[1:])]
        columns_ = "".join(f"<td{value}>{cell}</td>" for cell, value in zip(linked, data, strict=True))
        body.append(f'<tr class="{trial.state}">{columns_}<td>{_links(trial.folder, results.folder)}</td></tr>')
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _links(folder: Path, root: Path) -> str:
    """Return links to a trial's run folder and its files, those that exist."""
    paths = [("run", folder), *((name, folder / name) for name in ("logs", "config.toml", "events.jsonl"))]
    relative = [(name, os.path.relpath(path, root)) for name, path in paths if path.exists()]
    return " ".join(f'<a href="{escape(path)}">{escape(name)}</a>' for name, path in relative)
