"""Read a rank's trace event by event, with times on rank 0's clock; the owners of memory at its peak.

The memory that reading needs does not grow with the file.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.errors import UsageError

FORMAT = 1
"""The version of what `record.py` adds to a trace of torch."""
_SCHEMA = 1
_CHUNK = 1 << 20
_LIST = '"traceEvents":'
_BETWEEN = re.compile(r"[\s,]*")
_NAME = re.compile(r"rank-(\d+)\.json\.gz")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class RankFile:
    """A trace of one rank. `meta` is what Phalanx added to it; `base_ns`: what its times count from."""

    path: Path
    meta: dict[str, Any]
    base_ns: int

    @classmethod
    def open(cls, path: Path) -> RankFile:
        """Read the beginning of a file; an error says what is wrong with it."""
        header = _header(path)
        meta = header.get("phalanx")
        if not isinstance(meta, dict) or meta.get("format") != FORMAT or header.get("schemaVersion") != _SCHEMA:
            torch = meta.get("torch", "unknown") if isinstance(meta, dict) else "unknown"
            raise UsageError(
                f"{path} is not a trace that this version reads (torch {torch}, schema {header.get('schemaVersion')})",
                hint="Record it again: phalanx train ... --profile steps=10:15",
            )
        return cls(path, meta, int(header.get("baseTimeNanoseconds", 0)))

    @property
    def rank(self) -> int:
        """The rank that was recorded."""
        return int(self.meta["rank"])

    def seconds(self, ts: float, origin_ns: int) -> float:
        """Return a time of the file in seconds after `origin_ns`, on rank 0's clock."""
        local = self.base_ns + ts * 1000.0
        return (self.base_ns - origin_ns) / 1e9 + ts / 1e6 + self._offset(local) / 1e9

    def _offset(self, local: float) -> float:
        """Return how far rank 0's clock was ahead: clocks drift, so it lies between what begin and end have shown."""
        readings = self.meta.get("clock") or [[0, 0, 0]]
        (first, before, _), (last, after, _) = readings[0], readings[-1]
        if last == first or before == after:
            return float(before)
        share = min(1.0, max(0.0, (local - first) / (last - first)))
        return float(before + share * (after - before))

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events one by one."""
        try:
            with gzip.open(self.path, "rt", encoding="utf-8", errors="replace") as file:
                yield from _listed(file, self.path)
        except (OSError, EOFError, zlib.error) as error:
            raise damaged(self.path, error) from None


def find_files(folder: Path) -> list[RankFile]:
    """Return the traces of a folder by rank; empty where there are none."""
    paths = [(int(match[1]), path) for path in folder.glob("rank-*.json.gz") if (match := _NAME.fullmatch(path.name))]
    return [RankFile.open(path) for _, path in sorted(paths)]


def damaged(path: Path, error: object) -> UsageError:
    """Return the error for a file that cannot be read to its end."""
    return UsageError(
        f"{path} is damaged: {error}", hint="Remove it: the other ranks are then shown, or record it again."
    )


def _header(path: Path) -> dict[str, Any]:
    """Return what stands before the list of events."""
    text = ""
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            while _LIST not in text:
                more = file.read(_CHUNK)
                if not more:
                    raise ValueError("it has no traceEvents")
                text += more
        header: dict[str, Any] = json.loads(text.partition(_LIST)[0].rstrip().rstrip(",") + "}")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise damaged(path, error) from None
    return header


def _listed(file: Any, path: Path) -> Iterator[dict[str, Any]]:
    """Decode the list of events from a part of the text at a time."""
    text = ""
    while _LIST not in text:
        text += file.read(_CHUNK)
    position = text.index("[", text.index(_LIST)) + 1
    while True:
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]  # it matches nothing as well
        if text[position : position + 1] == "]":
            return
        try:
            event, position = _DECODER.raw_decode(text, position)
        except ValueError:
            more = file.read(_CHUNK)
            if not more:
                raise damaged(path, "it ends within an event") from None
            text, position = text[position:] + more, 0
            continue
        yield event


_SHOWN = 20


class MemoryOwners(NamedTuple):
    """The most bytes that were in use at once, of those allocated while recording, and their owners."""

    peak: int
    owners: list[tuple[str, int, int]]
    """(owner, bytes, allocations), the largest first."""


def owners_at_peak(history: Iterable[tuple[int, int, str]]) -> MemoryOwners:
    """Replay allocations (address, bytes, owner) and frees (bytes below 0); return the owners at the peak."""
    live: dict[int, tuple[int, str]] = {}
    used = peak = 0
    by_owner: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    best: dict[str, tuple[int, int]] = {}
    for address, nbytes, owner in history:
        if nbytes > 0:
            live[address] = (nbytes, owner)
            used += nbytes
            by_owner[owner][0] += nbytes
            by_owner[owner][1] += 1
        elif address in live:  # else it was allocated before recording began
            if used > peak:  # copied at the top only, not with each allocation on the way
                peak, best = used, {name: (value[0], value[1]) for name, value in by_owner.items()}
            size, name = live.pop(address)
            used -= size
            by_owner[name][0] -= size
            by_owner[name][1] -= 1
    if used > peak:
        peak, best = used, {name: (value[0], value[1]) for name, value in by_owner.items()}
    ranked = sorted(((name, *value) for name, value in best.items() if value[0]), key=lambda row: -row[1])
    return MemoryOwners(peak, ranked[:_SHOWN])


def top_owners(trace: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the owners at the peak of a CUDA allocator's history, as plain data; an owner is a line of the user's."""
    history = [
        (int(entry["addr"]), int(entry["size"]) * (1 if entry["action"] == "alloc" else -1), _line(entry))
        for entry in trace
        if entry["action"] in ("alloc", "free_completed")
    ]
    return owners_at_peak(history)._asdict()


def _line(entry: dict[str, Any]) -> str:
    """Return the innermost Python line outside of torch, else the innermost one."""
    frames = [frame for frame in entry.get("frames", []) if str(frame.get("filename", "")).endswith(".py")]
    users = next((f for f in frames if "/torch/" not in f["filename"]), frames[0] if frames else None)
    return f"{users['filename']}:{users['line']} {users['name']}" if users else "backward pass (no Python line)"
