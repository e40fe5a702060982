"""What a shard counts: traffic, requests, time at work, and how stale the gradients were."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Figures of one shard since it started."""

    bytes_in: int = 0
    bytes_out: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    """Seconds spent adding up gradients and stepping."""
    updates: int = 0
    stale_sum: int = 0
    stale_max: int = 0
    """Updates by others between a worker's pull and the update that it computed from it."""
    ahead_max: int = 0
    """How many steps a worker was ahead of the slowest when it was let go on."""
    late: int = 0
    """Contributions that came when their step had been taken already, and were dropped."""
    saves: int = 0
    began: float = field(default_factory=time.monotonic)
    _first_update: float = 0.0
    _last_update: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def received(self, kind: str, size: int) -> None:
        """Count a request; every connection has a thread of its own."""
        with self._lock:
            self.bytes_in += size
            self.requests[kind] += 1

    def sent(self, size: int) -> None:
        """Count an answer."""
        with self._lock:
            self.bytes_out += size

    def worked(self, begin: float) -> None:
        """Count the time since `begin` (perf_counter) as work on gradients and parameters."""
        self.busy_s += time.perf_counter() - begin

    def updated(self) -> None:
        """Count an update."""
        self.updates += 1
        self._last_update = time.monotonic()
        self._first_update = self._first_update or self._last_update

    @property
    def updates_per_second(self) -> float:
        """Updates a second between the first and the last: what came before and after them is not their time."""
        seconds = self._last_update - self._first_update
        return (self.updates - 1) / seconds if self.updates > 1 and seconds > 0 else 0.0

    def stale(self, updates: int) -> None:
        """Note how many updates lay between a worker's pull and its own update."""
        self.stale_sum += updates
        self.stale_max = max(self.stale_max, updates)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        return {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "requests": sum(self.requests.values()),
            "busy": self.busy_s / seconds,
            "updates": self.updates,
            "updates_per_second": self.updates_per_second,
            "staleness_mean": self.stale_sum / self.updates if self.updates else 0.0,
            "staleness_max": self.stale_max,
            "ahead_max": self.ahead_max,
            "late": self.late,
            "saves": self.saves,
            "seconds": seconds,
        }
