"""All ranks of a run at one moment: a table where they are few, percentiles where they are many, the slowest named."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from phalanx.observe.events import RanksReported
from phalanx.observe.heartbeat import Beat, Gauges

PERCENTILES = (0, 50, 90, 99, 100)
SHOWN_RANKS = 64
"""More ranks than these are not shown one by one."""
_CLEARLY_SLOWER = 1.2


def percentiles(values: Iterable[float]) -> list[float]:
    """Return `PERCENTILES` of the values that are known, each the value of some rank; empty where none is."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return []
    return [
        known[min(len(known) - 1, math.ceil(share / 100 * len(known)) - 1 if share else 0)] for share in PERCENTILES
    ]


def paces(beats: Mapping[int, Beat]) -> dict[int, float]:
    """Return the seconds per step that order ranks by speed: their own work where it is known, else all of the step.

    In lock-step all steps are equally long: a fast rank waits for a slow one.
    """
    for name in ("own_seconds", "step_seconds"):
        found = {rank: getattr(beat.gauges, name) for rank, beat in beats.items()}
        known = {rank: value for rank, value in found.items() if not math.isnan(value)}
        if known:
            return known
    return {}


def slowness(beats: Mapping[int, Beat]) -> float | None:
    """Return the slowest rank's own time over the median of the others; None for fewer than two ranks."""
    found = sorted(paces(beats).values())
    usual = statistics.median(found[:-1]) if len(found) > 1 else 0.0
    return found[-1] / usual if usual else None


def slowest_of(beats: Mapping[int, Beat]) -> int | None:
    """Return the rank whose own work takes clearly longer than the median of the others; None where none does."""
    ratio, found = slowness(beats), paces(beats)
    return max(found, key=lambda rank: found[rank]) if ratio is not None and ratio > _CLEARLY_SLOWER else None


def slowest_first(beats: Mapping[int, Beat], number: int = SHOWN_RANKS) -> list[int]:
    """Return up to `number` ranks, the slowest first; ranks that are furthest behind come before those."""
    found = paces(beats)
    return sorted(beats, key=lambda rank: (beats[rank].step, -found.get(rank, 0.0)))[:number]


def report(beats: Mapping[int, Beat]) -> RanksReported:
    """Return the ranks as an event; `beats` as `read_beats` returns them."""
    shown = sorted(slowest_first(beats))
    values: dict[str, list[float]] = {}
    spread: dict[str, Sequence[float]] = {}
    for name in (each.name for each in fields(Gauges)):
        found = percentiles(getattr(beat.gauges, name) for beat in beats.values())
        if found:
            values[name] = [getattr(beats[rank].gauges, name) for rank in shown]
            spread[name] = found
    return RanksReported(
        step=max((beat.step for beat in beats.values()), default=0),
        ranks=shown,
        values=values,
        percentiles={name: list(found) for name, found in spread.items()},
        counted=len(beats),
        slowest=slowest_of(beats),
    )


def beats_of(event: Mapping[str, Any]) -> dict[int, Beat]:
    """Return the ranks that a report shows one by one, from the event in a file; none where that is damaged."""
    names, found = [each.name for each in fields(Gauges)], {}
    try:
        for place, rank in enumerate(event.get("ranks", ())):
            values = {name: event["values"][name][place] for name in names if name in event["values"]}
            known = {name: float(value) for name, value in values.items() if value is not None}
            found[int(rank)] = Beat(int(event["step"]), float(event["time"]), 0, Gauges(**known))
    except (LookupError, TypeError, ValueError, OverflowError):
        return {}
    return found if all(math.isfinite(beat.time) for beat in found.values()) else {}
