"""The page of a search: one HTML file that needs nothing else, with both pictures and every trial."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from phalanx.tune.charts import Axis, Line
from phalanx.tune.results import Results
from phalanx.tune.table import brief, columns, point_words, ranked
from phalanx.tune.trial import State

PAGE_FILE = "study.html"
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
    """Return the whole page."""
    best = results.best
    head, rows = columns(ranked(results.trials, results.objective), results.objective)
    states = [str(trial.state) for trial in ranked(results.trials, results.objective)]
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head>',
            f"<body><h1>{escape(title)}</h1>",
            f"<p>Best of {len(results.trials)} trials: trial {best.number}, {escape(results.objective.metric)} "
            f"<b>{brief(results.best_value)}</b> with {escape(point_words(best.params))}.</p>",
            "<h2>Hyperparameters</h2><p>A line is a trial; the darker, the better. Point at one to see which.</p>",
            f'<div class="scroll">{parallel_svg(axes, lines)}</div>',
            "<h2>Learning curves</h2><p>A curve that ends with a cross was given up there.</p>",
            curves_svg(axes[-1].name, lines),
            "<h2>Trials</h2>",
            f'<div class="scroll">{_table(head, rows, states)}</div>',
            _causes(results),
            "</body></html>\n",
        ]
    )


def parallel_svg(axes: Sequence[Axis], lines: Sequence[Line]) -> str:
    """Draw one upright axis a hyperparameter, and a line a trial across them."""
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


def curves_svg(metric: str, lines: Sequence[Line]) -> str:
    """Draw the metric over iterations."""
    curves = [line for line in lines if line.curve]
    if not curves:
        return "<p>No trial reported the metric on its way.</p>"
    width, last = 720, max(line.curve[-1][0] for line in curves)
    first = min(line.curve[0][0] for line in curves)
    values = [value for line in curves for _, value in line.curve]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def place(point: tuple[int, float]) -> tuple[float, float]:
        share = (point[0] - first) / max(1, last - first)
        return _LEFT + share * (width - 2 * _LEFT), _down((point[1] - low) / span)

    parts = [f'<svg viewBox="0 0 {width} {_HEIGHT + 2 * _TOP + 10}" width="{width}" role="img">']
    for line in curves:
        points = [place(point) for point in line.curve]
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
    told = escape(f"trial {line.trial.number}: {point_words(line.trial.params)}")
    return f'<path d="M{course}" stroke="{line.color}" stroke-width="{width}"><title>{told}</title></path>'


def _table(head: list[str], rows: list[list[str]], states: list[str]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f'<tr class="{state}">' + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row, state in zip(rows, states, strict=True)
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _causes(results: Results) -> str:
    if not results.failed:
        return ""
    rows = "".join(f"<li>trial {trial.number}: {escape(trial.cause)}</li>" for trial in results.failed)
    return f"<h2>Failures</h2><ul>{rows}</ul>"
