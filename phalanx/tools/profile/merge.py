"""Merge the ranks' traces into one for Perfetto: a process per rank, collectives linked across ranks by flows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.host.files import replacing
from phalanx.tools.profile.read import RankFile, find_files
from phalanx.tools.profile.split import Analysis, LinkedCall, find_links

MERGED = "trace.json.gz"
_FLOWS = ("s", "t", "f")
_OWN_PAGES = ("Spans", "Traces", "")
"""Processes that torch's profiler invents for itself."""
_IDS = 1 << 40
"""Room for the flow numbers of one rank: numbers of two ranks must differ."""


def merge(folder: Path, found: Analysis) -> Path:
    """Write `trace.json.gz` beside the ranks' traces, event by event; return its path."""
    files = find_files(folder)
    origin = files[0].base_ns + 1000 * int(next(float(event["ts"]) for event in files[0].events() if "ts" in event))
    target = folder / MERGED
    with replacing(target) as file, gzip.open(file, "wt", compresslevel=3, encoding="utf-8") as packed:
        packed.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        before, encode = "", json.JSONEncoder(separators=(",", ":")).encode
        for event in _events(files, origin, found):
            packed.write(before + encode(event))
            before = ",\n"
        packed.write("\n]}\n")
    return target


def _events(files: list[RankFile], origin: int, found: Analysis) -> Iterator[dict[str, Any]]:
    for file in files:
        yield _named("process_name", file.rank, {"name": f"rank {file.rank} ({file.meta['host']})"})
        yield _named("process_sort_index", file.rank, {"sort_index": file.rank})
        for event in file.events():
            if event.get("pid") not in _OWN_PAGES and not str(event["name"]).startswith("process_"):
                yield _placed(event, file, origin)
    shift = (files[0].base_ns - origin) / 1e9
    number = len(files) * _IDS
    for step in found.steps:
        for link in find_links(found.timelines, step):
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
    for place, rank in enumerate(ranks):
        yield {
            "ph": "s" if place == 0 else "f" if place == len(ranks) - 1 else "t",
            "bp": "e",
            "cat": "collective",
            "name": f"{link.key} #{link.number} of step {step}",
            "id": number,
            "pid": rank,
            "tid": link.threads[rank],
            "ts": round((link.spans[rank][0] + shift) * 1e6 + 0.001, 3),
        }
