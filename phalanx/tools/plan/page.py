"""A plan as one self-contained page: bars of memory and time, tables, the command. No script, nothing from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from phalanx.tools.plan.compare import HEAD, Answer, rows
from phalanx.tools.plan.explain import name as layout_name
from phalanx.tools.plan.report import Plan
from phalanx.tools.plan.text import (
    beside_words,
    cost_words,
    count,
    gpu_name,
    reliability_words,
    seconds,
    settings_toml,
    train_command,
    words,
)

_COLOURS = (
    *("#3b6fb6", "#e08a3c", "#5aa469", "#c05c7e", "#8567ad", "#7a7a7a", "#b9a440", "#3fa7a3"),
    *("#a0522d", "#d2691e", "#4b5563"),
)
_WIDTH = 860
_STYLE = """
:root { --ink: #1b2733; --soft: #5b6b7b; --grid: #e3e8ee; --paper: #fff; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; } p { margin: .3rem 0; }
.big { font-size: 1.15rem; } .soft { color: var(--soft); } .wrong { color: #b42318; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
pre { background: color-mix(in srgb, var(--grid) 50%, transparent); padding: .7rem 1rem; overflow-x: auto; }
figure { margin: .6rem 0; } figcaption span { white-space: nowrap; margin-right: 1rem; }
figcaption i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px; }
.scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { :root { --ink: #dbe4ee; --soft: #94a3b3; --grid: #263341; --paper: #10161d; } }
"""


def page(plan: Plan, subject: str, answers: Sequence[Answer] = (), engines: Sequence[tuple[str, str, str]] = ()) -> str:
    """Return the page; `engines`: the rows of `EngineTable`."""
    title = f"{plan.model.name} on {plan.cluster.gpus} x {gpu_name(plan)}"
    parts = "\n".join([*_parts(plan, subject), *(part for each in answers for part in _answer(each))])
    parts += "\n" + _section("Engines for this job", engines)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{parts}\n</body></html>\n"
    )


def _parts(plan: Plan, subject: str) -> Iterator[str]:
    machines = f"{plan.cluster.nodes} machine{'s' * (plan.cluster.nodes > 1)} of {plan.cluster.gpus_per_node} GPUs"
    yield f"<p class=soft>{count(plan.model.parameters)} parameters, {machines}, {plan.searched:,} layouts examined</p>"
    if plan.best is None:
        yield "<p class='big wrong'>No layout fits.</p><h2>The smallest changes with which one does</h2>"
        yield "<ul>" + "".join(f"<li>{escape(change)}</li>" for change in plan.smallest_change) + "</ul>"
        yield _section("Refused", [(f"{number:,}", reason) for reason, number in plan.refused])
        return
    found = plan.best.estimate
    low, high = found.interval
    step = f"{seconds(found.step_seconds)} per step ({seconds(low)} to {seconds(high)}), "
    speed = f"{found.tokens_per_second_per_gpu:,.0f} per second and GPU, MFU {found.mfu:.1%}, HFU {found.hfu:.1%}"
    yield f"<p class=big><b>{escape(layout_name(plan.best.layout))}</b></p><p>{escape(step + speed)}</p>"
    yield f"<p>{escape(cost_words(plan))}</p>" if plan.cost else ""
    yield f"<p class=soft>{escape(plan.batch)}</p>"
    limit = found.memory_limit_gib
    yield f"<h2>Memory per GPU, of {limit:.1f} GiB</h2>"
    for kind, memory in found.bars.items():
        caption = f"{kind}: {sum(memory.values()):.1f} GiB, {limit - sum(memory.values()):.1f} free"
        yield _bar(memory, max(limit, sum(memory.values())), caption, "GiB")
    yield f"<h2>Time of a step</h2><p>What limits it: {escape(plan.binding)}</p>"
    yield _bar(found.breakdown, found.step_seconds, seconds(found.step_seconds), "s")
    if hidden := {name: part for name, part in found.hidden.items() if part > 0}:
        yield _bar(hidden, found.step_seconds, "hidden behind computation, to the same scale", "s")
    yield f"<p class=soft>Beside it: {escape(beside_words(plan))}</p>" if plan.reliability else ""
    yield from _tables(plan)
    yield f"<h2>To train it</h2><pre>{escape(train_command(plan, subject))}</pre>"
    yield f"<p class=soft>The same as a file for --config:</p><pre>{escape(settings_toml(plan.settings))}</pre>"


def _tables(plan: Plan) -> Iterator[str]:
    rows = [(layout_name(each.layout), seconds(each.estimate.step_seconds), each.reason) for each in plan.runners_up]
    yield _section("Runners-up, and why each lost", rows)
    yield _section("Refused, as phalanx train would", [(f"{number:,}", reason) for reason, number in plan.refused])
    yield _section("Assumed, and where it comes from", plan.assumptions)
    yield _section("Sensitivity", [(change, f"step {relative:+.1%}") for change, relative in plan.sensitivity])
    yield f"<h2>Reliability</h2><p>{escape(reliability_words(plan))}</p>" if plan.reliability else ""


def _answer(answer: Answer) -> Iterator[str]:
    yield f"<h2>What if: {escape(answer.question)}</h2><p>{escape(answer.sentence)}</p>"
    if answer.variants:
        yield _section("", [HEAD, *rows(answer.variants)])
        times = {name: each.best.estimate.step_seconds for name, each in answer.variants if each.best}
        for name, value in times.items():
            yield _bar({name: value}, max(times.values()), f"{name}: {seconds(value)}", "s")


def _section(title: str, rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = f"<h2>{escape(title)}</h2>" if title else ""
    return f"{head}<div class=scroll><table>{lines}</table></div>"


def _bar(parts: Mapping[str, float], whole: float, caption: str, unit: str) -> str:
    """Return a bar of parts as SVG, with what each colour means."""
    drawn, legend, left = [], [], 0.0
    for colour, (name, part) in zip(_COLOURS, parts.items(), strict=False):
        if part <= 0:
            continue
        width, label = _WIDTH * part / (whole or 1.0), f"{words(name)} {part:.3g} {unit}"
        drawn.append(
            f'<rect x="{left:.1f}" width="{width:.1f}" height="26" fill="{colour}"><title>{escape(label)}</title>'
            "</rect>"
        )
        legend.append(f'<span><i style="background:{colour}"></i>{escape(label)}</span>')
        left += width
    frame = f'<rect width="{_WIDTH}" height="26" fill="none" stroke="var(--soft)"/>'
    svg = f'<svg viewBox="0 0 {_WIDTH} 26" width="{_WIDTH}" height="26" role="img">{"".join(drawn)}{frame}</svg>'
    return f"<figure><b>{escape(caption)}</b><br>{svg}<figcaption class=soft>{''.join(legend)}</figcaption></figure>"
