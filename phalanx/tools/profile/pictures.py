"""Pictures of a profile: one trace of all ranks for Perfetto, and the first steps as SVG.

In the trace each rank is a process, and collectives are linked across ranks by flows.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from phalanx.host.files import replacing
from phalanx.tools.profile.read import RankFile, find_files
from phalanx.tools.profile.split import Analysis, LinkedCall, find_links
from phalanx.tools.profile.timeline import clip
from phalanx.tools.svg import drawing, legend

MERGED = "trace.json.gz"
_FLOWS = ("s", "t", "f")
_OWN_PAGES = ("Spans", "Traces", "")
"""Processes that torch's profiler invents for itself."""
_IDS = 1 << 40
"""Room for the flow numbers of one rank: numbers of two ranks must differ."""


def merge(folder: Path, analysis: Analysis) -> Path:
    """Write `trace.json.gz` beside the ranks' traces, event by event; return its path."""
    files = find_files(folder)
    origin = files[0].base_ns + 1000 * int(next(float(event["ts"]) for event in files[0].events() if "ts" in event))
    target = folder / MERGED
    with replacing(target) as file, gzip.open(file, "wt", compresslevel=3, encoding="utf-8") as packed:
        packed.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        before, encode = "", json.JSONEncoder(separators=(",", ":")).encode
        for event in _events(files, origin, analysis):
            packed.write(before + encode(event))
            before = ",\n"
        packed.write("\n]}\n")
    return target


def _events(files: list[RankFile], origin: int, analysis: Analysis) -> Iterator[dict[str, Any]]:
    for file in files:
        yield _named("process_name", file.rank, {"name": f"rank {file.rank} ({file.meta['host']})"})
        yield _named("process_sort_index", file.rank, {"sort_index": file.rank})
        for event in file.events():
            if event.get("pid") not in _OWN_PAGES and not str(event["name"]).startswith("process_"):
                yield _placed(event, file, origin)
    shift = (files[0].base_ns - origin) / 1e9
    number = len(files) * _IDS
    for step in analysis.steps:
        for link in find_links(analysis.timelines, step):
            number += 1
            yield from _flow(link, step, number, shift)


def _named(name: str, rank: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": args}


def _placed(event: dict[str, Any], file: RankFile, origin: int) -> dict[str, Any]:
    """Return an event of a rank as one of its process in the merged trace, on rank 0's clock."""
    event["pid"] = file.rank
    if "ts" in event:
        event["ts"] = round(file.seconds(float(event["ts"]), origin) * 1e6, 3)
    if event.get("ph") in _FLOWS:
        event["id"] = file.rank * _IDS + int(event["id"])
    return event


def _flow(link: LinkedCall, step: int, number: int, shift: float) -> Iterator[dict[str, Any]]:
    """Yield the arrows of a collective, from the rank that entered first to the one that entered last."""
    ranks = sorted(link.spans, key=lambda rank: link.spans[rank][0])
    for index, rank in enumerate(ranks):
        yield {
            "ph": "s" if index == 0 else "f" if index == len(ranks) - 1 else "t",
            "bp": "e",
            "cat": "collective",
            "name": f"{link.key} #{link.number} of step {step}",
            "id": number,
            "pid": rank,
            "tid": link.threads[rank],
            "ts": round((link.spans[rank][0] + shift) * 1e6 + 0.001, 3),
        }


_COLOURS = {
    "data": "#e6a23c", "forward": "#409eff", "backward": "#7a5fd0", "optimizer": "#36a37b", "checkpoint": "#d0455c",
    "evaluation": "#6bb5d8", "other": "#b8bcc4", "communication": "#444a57",
}  # fmt: skip
_WIDTH, _LEFT, _TOP, _LANE, _RANK = 1000, 90, 46, 18, 52
_STEPS, _RANKS = 3, 16
_SMALLEST = 0.4
"""Pixels: shorter ranges would not be seen."""


def draw(analysis: Analysis) -> str:
    """Return the first steps of the first ranks as SVG."""
    steps = analysis.steps[:_STEPS]
    ranks = analysis.timelines[:_RANKS]
    begin = min(timeline.steps[steps[0]][0] for timeline in ranks)
    end = max(timeline.steps[steps[-1]][1] for timeline in ranks)
    scale = (_WIDTH - _LEFT - 10) / (end - begin)
    rows = {timeline.rank: _TOP + index * _RANK for index, timeline in enumerate(ranks)}

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

    marks = "".join(
        f'<text x="{x(ranks[0].steps[step][0]) + 2}" y="38" fill="#666">step {step}, '
        f"{(ranks[0].steps[step][1] - ranks[0].steps[step][0]) * 1e3:.1f} ms</text>"
        for step in steps
    )
    named = legend(_COLOURS, _LEFT, 8)
    parts = ['<rect width="100%" height="100%" fill="#fff"/>', named, marks, *boxes(), *arrows()]
    text = f'<g font-family="sans-serif" font-size="12">{"".join(parts)}</g>'
    return drawing((_WIDTH, _TOP + len(ranks) * _RANK), [text], is_file=True)
