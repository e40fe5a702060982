"""A plan as one self-contained page: bars of memory and time, tables, the command. No script, nothing from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from phalanx.observe.svg import COLORS, drawing, html_page
from phalanx.tools.plan.compare import HEAD, Answer, rows
from phalanx.tools.plan.plans import Plan
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

_WIDTH = 860
_STYLE = """
body { max-width: 62rem; } .wrong { color: #b42318; } svg { max-width: 100%; height: auto; }
pre { background: color-mix(in srgb, var(--grid) 50%, transparent); padding: .7rem 1rem; overflow-x: auto; }
figure { margin: .6rem 0; } figcaption span { white-space: nowrap; margin-right: 1rem; }
figcaption i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px; }
"""


def page(plan: Plan, subject: str, answers: Sequence[Answer] = (), engines: Sequence[tuple[str, str, str]] = ()) -> str:
    """Return the page; `engines`: the rows of `EngineTable`."""
    title = f"{plan.model.name} on {plan.cluster.gpus} x {gpu_name(plan)}"
    parts = [*_parts(plan, subject), *(part for each in answers for part in _answer(each))]
    return html_page(title, [*parts, _section("Engines for this job", engines)], _STYLE)


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
    yield f"<p class=big><b>{escape(plan.best.layout.title)}</b></p><p>{escape(step + speed)}</p>"
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
    rows = [(each.layout.title, seconds(each.estimate.step_seconds), each.reason) for each in plan.runners_up]
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
    for colour, (name, part) in zip(COLORS, parts.items(), strict=False):
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
    svg = drawing((_WIDTH, 26), [*drawn, frame])
    return f"<figure><b>{escape(caption)}</b><br>{svg}<figcaption class=soft>{''.join(legend)}</figcaption></figure>"
