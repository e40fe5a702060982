"""A plan as one self-contained page: bars of memory and time, tables, the command. No script, nothing from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from phalanx.tools.plan.plans import TIME_PARTS, Plan
from phalanx.tools.plan.text import PartsBar, Section, gpu_name, seconds, sections, words
from phalanx.tools.plan.what_if import HEAD, Answer, rows
from phalanx.tools.svg import COLORS, drawing, html_page

_WIDTH = 860
_PLACES = {name: place for place, name in enumerate(TIME_PARTS)}
_PLACES |= {"communication": _PLACES["data_comm"], "parameters": 0, "gradients": 1, "activations": 2, "logits": 3}
_PLACES["reserve"] = _PLACES["variation"]
"""The color of each part by its name: what is in memory and in the time of a step has one color."""
_STYLE = """
body { max-width: 62rem; } svg { max-width: 100%; height: auto; }
pre { background: color-mix(in srgb, var(--grid) 50%, transparent); padding: .7rem 1rem; overflow-x: auto; }
figure { margin: .6rem 0; } figcaption span { white-space: nowrap; margin-right: 1rem; }
figcaption i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px; }
"""


def page(plan: Plan, subject: str, answers: Sequence[Answer] = (), engines: Sequence[tuple[str, str, str]] = ()) -> str:
    """Return the page; `engines`: rows of what each engine can do."""
    shown = [*sections(plan, subject, whole=True), *map(_answer, answers)]
    shown += [Section("engines for this job", engines)] if engines else []
    title = f"{plan.model.name} on {plan.cluster.gpus} x {gpu_name(plan)}"
    return html_page(title, (part for section in shown for part in _parts(section)), _STYLE)


def _answer(answer: Answer) -> Section:
    steps = {name: each.best.estimate.step_seconds for name, each in answer.variants if each.best}
    longest = max(steps.values(), default=0.0)
    bars = [PartsBar({name: step}, longest, "s", f"{name}: {seconds(step)}") for name, step in steps.items()]
    table = [HEAD, *rows(answer.variants)] if answer.variants else []
    return Section(f"what if: {answer.question}", table, bars, [answer.sentence])


def _parts(section: Section) -> Iterator[str]:
    yield f"<h2>{escape(section.title[:1].upper() + section.title[1:])}</h2>"
    yield from map(_bar, section.bars)
    if section.rows:
        lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in section.rows)
        yield f"<div class=scroll><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table></div>"
    yield f"<pre>{escape(section.code)}</pre>" if section.code else ""
    yield from (f"<p class=soft>{escape(' '.join(line.split()))}</p>" for line in section.lines)


def _bar(bar: PartsBar) -> str:
    """Return a bar of parts as SVG, with what each color means."""
    drawn, legend, left = [], [], 0.0
    for number, (name, part) in enumerate(bar.parts.items()):
        if part <= 0:
            continue
        color = COLORS[_PLACES.get(name, number)]
        width, label = _WIDTH * part / (bar.whole or 1.0), f"{words(name)} {part:.3g} {bar.unit}"
        place = f'x="{left:.1f}" width="{width:.1f}" height="26"'
        drawn.append(f'<rect {place} fill="{color}"><title>{escape(label)}</title></rect>')
        legend.append(f'<span><i style="background:{color}"></i>{escape(label)}</span>')
        left += width
    frame = f'<rect width="{_WIDTH}" height="26" fill="none" stroke="var(--soft)"/>'
    head = escape(": ".join(text for text in (bar.label, bar.caption) if text))
    svg = drawing((_WIDTH, 26), [*drawn, frame])
    return f"<figure><b>{head}</b><br>{svg}<figcaption class=soft>{''.join(legend)}</figcaption></figure>"
