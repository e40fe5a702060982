"""What the ranks of several nodes exchange for a profile: how their clocks differ, and traces that rank 0 lacks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from phalanx.config.profile import Profiling
from phalanx.host.files import replace_file
from phalanx.world.world import World

_CHUNK = 1 << 20
_ROUNDS = 8
"""Round trips per rank: the fastest one counts, for it waited the least on its way."""


class ClockReading(NamedTuple):
    """At `time` on this machine's clock, rank 0's clock was `offset` ahead; both in nanoseconds since the epoch."""

    time: int
    offset: int
    round_trip: int


class TraceExchange:
    """Clock readings and traces of the ranks that `plan` covers; ranks of one node have both in common."""

    def __init__(self, plan: Profiling, world: World, folder: Path) -> None:
        self._plan, self._world, self._folder = plan, world, folder
        self.clocks: list[ClockReading] = []

    def path(self, rank: int) -> Path:
        """Return where the trace of a rank is."""
        return self._folder / f"rank-{rank}.json.gz"

    def _others(self) -> list[int]:
        return [rank for rank in range(1, self._world.world_size) if self._plan.covers(rank)]

    def compare_clocks(self, when: str) -> None:
        """Compare this machine's clock with rank 0's; ranks of one node have the same."""
        world, key = self._world, f"profile/{when}"
        if world.store is None or world.env.on_one_node:
            self.clocks.append(ClockReading(0, 0, 0))
        elif world.is_main:
            self.clocks.append(answer_clocks(world.store, key, self._others()))
        elif self._plan.covers(world.rank):
            self.clocks.append(compare_clock(world.store, key, world.rank))

    def collect(self) -> None:
        """Send the main rank the traces that it does not find in the run's folder: nodes may not share it."""
        store, rank = self._world.store, self._world.rank
        if store is None or self._world.env.on_one_node:
            return
        if self._plan.covers(rank) and rank:
            store.set(f"profile/size/{rank}", str(self.path(rank).stat().st_size if self.path(rank).exists() else 0))
        if self._world.is_main:
            sizes = {other: int(store.get(f"profile/size/{other}")) for other in self._others()}
            paths = {other: self.path(other) for other in sizes}
            missing = [
                r for r, path in paths.items() if sizes[r] and not (path.exists() and path.stat().st_size == sizes[r])
            ]
            store.set("profile/missing", json.dumps(missing))
            self._folder.mkdir(parents=True, exist_ok=True)
            for other in missing:
                keys = [f"profile/{other}/{begin}" for begin in range(0, sizes[other], _CHUNK)]
                replace_file(self.path(other), b"".join(store.get(key) for key in keys))
        elif self._plan.covers(rank) and rank in json.loads(store.get("profile/missing")):
            content = self.path(rank).read_bytes()
            for begin in range(0, len(content), _CHUNK):
                store.set(f"profile/{rank}/{begin}", content[begin : begin + _CHUNK])  # type: ignore[arg-type]  # it takes bytes


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
    readings = []
    for number in range(_ROUNDS):
        sent = clock()
        store.set(f"{key}/{rank}/{number}/ask", "")
        answer = int(store.get(f"{key}/{rank}/{number}/answer"))
        now = clock()
        middle = (sent + now) // 2
        readings.append(ClockReading(middle, answer - middle, now - sent))
    return min(readings, key=lambda reading: reading.round_trip)
