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
    numbers = sorted(value for value in values if not math.isnan(value))
    if not numbers:
        return []
    return [
        numbers[min(len(numbers) - 1, math.ceil(share / 100 * len(numbers)) - 1 if share else 0)]
        for share in PERCENTILES
    ]


def paces(beats: Mapping[int, Beat]) -> dict[int, float]:
    """Return the seconds per step that order ranks by speed: their own work where it is known, else all of the step.

    In lock-step all steps are equally long: a fast rank waits for a slow one.
    """
    for name in ("own_seconds", "step_seconds"):
        seconds = {rank: getattr(beat.gauges, name) for rank, beat in beats.items()}
        measured = {rank: value for rank, value in seconds.items() if not math.isnan(value)}
        if measured:
            return measured
    return {}


def slowness(beats: Mapping[int, Beat]) -> float | None:
    """Return the slowest rank's own time over the median of the others; None for fewer than two ranks."""
    seconds = sorted(paces(beats).values())
    usual = statistics.median(seconds[:-1]) if len(seconds) > 1 else 0.0
    return seconds[-1] / usual if usual else None


def slowest_of(beats: Mapping[int, Beat]) -> int | None:
    """Return the rank whose own work takes clearly longer than the median of the others; None where none does."""
    ratio, seconds = slowness(beats), paces(beats)
    return max(seconds, key=lambda rank: seconds[rank]) if ratio is not None and ratio > _CLEARLY_SLOWER else None


def slowest_first(beats: Mapping[int, Beat], number: int = SHOWN_RANKS) -> list[int]:
    """Return up to `number` ranks, the slowest first; ranks that are furthest behind come before those."""
    seconds = paces(beats)
    return sorted(beats, key=lambda rank: (beats[rank].step, -seconds.get(rank, 0.0)))[:number]


def report(beats: Mapping[int, Beat]) -> RanksReported:
    """Return the ranks as an event; `beats` as `read_beats` returns them."""
    ranks = sorted(slowest_first(beats))
    values: dict[str, list[float]] = {}
    spread: dict[str, Sequence[float]] = {}
    for name in (item.name for item in fields(Gauges)):
        shares = percentiles(getattr(beat.gauges, name) for beat in beats.values())
        if shares:
            values[name] = [getattr(beats[rank].gauges, name) for rank in ranks]
            spread[name] = shares
    return RanksReported(
        step=max((beat.step for beat in beats.values()), default=0),
        ranks=ranks,
        values=values,
        percentiles={name: list(shares) for name, shares in spread.items()},
        counted=len(beats),
        slowest=slowest_of(beats),
    )


def beats_of(event: Mapping[str, Any]) -> dict[int, Beat]:
    """Return the ranks that a report shows one by one, from the event in a file; none where that is damaged."""
    names, beats = [item.name for item in fields(Gauges)], {}
    try:
        for position, rank in enumerate(event.get("ranks", ())):
            values = {name: event["values"][name][position] for name in names if name in event["values"]}
            numbers = {name: float(value) for name, value in values.items() if value is not None}
            beats[int(rank)] = Beat(int(event["step"]), float(event["time"]), 0, Gauges(**numbers))
    except (LookupError, TypeError, ValueError, OverflowError):
        return {}
    return beats if all(math.isfinite(beat.time) for beat in beats.values()) else {}
