"""A picture of profiled steps: for each rank a lane of phases and one of communication, collectives linked."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from phalanx.tools.profile.intervals import clip
from phalanx.tools.profile.split import Analysis, find_links

_COLOURS = {
    "data": "#e6a23c", "forward": "#409eff", "backward": "#7a5fd0", "optimizer": "#36a37b", "checkpoint": "#d0455c",
    "evaluation": "#6bb5d8", "other": "#b8bcc4", "communication": "#444a57",
}  # fmt: skip
_WIDTH, _LEFT, _TOP, _LANE, _RANK = 1000, 90, 46, 18, 52
_STEPS, _RANKS = 3, 16
_SMALLEST = 0.4
"""Pixels: shorter ranges would not be seen."""


def draw(found: Analysis) -> str:
    """Return the first steps of the first ranks as SVG."""
    steps = found.steps[:_STEPS]
    ranks = found.timelines[:_RANKS]
    begin = min(timeline.steps[steps[0]][0] for timeline in ranks)
    end = max(timeline.steps[steps[-1]][1] for timeline in ranks)
    scale = (_WIDTH - _LEFT - 10) / (end - begin)
    rows = {timeline.rank: _TOP + place * _RANK for place, timeline in enumerate(ranks)}

    def x(time: float) -> float:
        return round(_LEFT + (time - begin) * scale, 2)

    def boxes() -> Iterator[str]:
        for timeline in ranks:
            top = rows[timeline.rank]
            yield f'<text x="8" y="{top + 24}">rank {timeline.rank}</text>'
            lanes = [(name, timeline.phases.get(name, []), top) for name in _COLOURS if name != "communication"]
            for name, spans, y in [*lanes, ("communication", timeline.communication, top + _LANE)]:
                for first, last in clip(spans, begin, end):
                    if (width := (last - first) * scale) >= _SMALLEST:
                        title = f"<title>{escape(name)} {(last - first) * 1e3:.2f} ms</title>"
                        shape = f'x="{x(first)}" y="{y}" width="{width:.2f}" height="{_LANE - 2}"'
                        yield f'<rect {shape} fill="{_COLOURS[name]}">{title}</rect>'
            for step in steps:
                at = x(timeline.steps[step][0])
                yield f'<path d="M{at} {top - 4}v{_RANK - 8}" stroke="#888" stroke-dasharray="2 2"/>'

    def arrows() -> Iterator[str]:
        for step in steps:
            for link in find_links(ranks, step):
                order = sorted(link.spans, key=lambda rank: rows[rank])
                points = " ".join(f"{x(link.spans[rank][0])},{rows[rank] + 2 * _LANE - 2}" for rank in order)
                yield f'<polyline points="{points}" fill="none" stroke="#d0455c" stroke-width="1.2"/>'

    legend = "".join(
        f'<rect x="{_LEFT + place * 112}" y="8" width="11" height="11" fill="{colour}"/>'
        f'<text x="{_LEFT + 16 + place * 112}" y="18">{name}</text>'
        for place, (name, colour) in enumerate(_COLOURS.items())
    )
    marks = "".join(
        f'<text x="{x(ranks[0].steps[step][0]) + 2}" y="38" fill="#666">step {step}, '
        f"{(ranks[0].steps[step][1] - ranks[0].steps[step][0]) * 1e3:.1f} ms</text>"
        for step in steps
    )
    height = _TOP + len(ranks) * _RANK
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f"{legend}{marks}{''.join(boxes())}{''.join(arrows())}</svg>\n"
    )
