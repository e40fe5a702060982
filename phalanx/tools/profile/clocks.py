"""How far the clocks of machines differ: each rank compares its clock with rank 0's through the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch.distributed as dist

_ROUNDS = 8
"""Round trips per rank: the fastest one counts, for it waited the least on its way."""


class ClockReading(NamedTuple):
    """At `time` on this machine's clock, rank 0's clock was `offset` ahead; both in nanoseconds since the epoch."""

    time: int
    offset: int
    round_trip: int


def answer_clocks(
    store: dist.Store, key: str, ranks: Iterable[int], clock: Callable[[], int] = time.time_ns
) -> ClockReading:
    """Answer what the other `ranks` ask with `compare_clock`; rank 0 calls this."""
    for rank in ranks:
        for number in range(_ROUNDS):
            store.get(f"{key}/{rank}/{number}/ask")  # waits for it
            store.set(f"{key}/{rank}/{number}/answer", str(clock()))
    return ClockReading(clock(), 0, 0)


def compare_clock(store: dist.Store, key: str, rank: int, clock: Callable[[], int] = time.time_ns) -> ClockReading:
    """Ask rank 0 for its time, several times, and return the reading of the fastest round trip."""
    found = []
    for number in range(_ROUNDS):
        sent = clock()
        store.set(f"{key}/{rank}/{number}/ask", "")
        answer = int(store.get(f"{key}/{rank}/{number}/answer"))
        now = clock()
        middle = (sent + now) // 2
        found.append(ClockReading(middle, answer - middle, now - sent))
    return min(found, key=lambda reading: reading.round_trip)
