"""Which workers take part and how far each has come, the rules of a job (synchronous, staleness), and statistics."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from phalanx.engines.parameter_server.placement import Placement
from phalanx.engines.parameter_server.state import StateFile, StateSlots, pattern_of


@dataclass
class WorkerTable:
    """Workers by number. A step of a worker has a number too, larger than all before it (`seq`)."""

    absent: set[int]
    """Expected workers that have not connected yet: no step is taken without them."""
    absent_until: float | None = None
    """When to continue without them (monotonic seconds); None: never."""
    live: dict[int, int] = field(default_factory=dict)
    """Connected workers, with the number of their connection."""
    committed: dict[int, int] = field(default_factory=dict)
    """The last step that each worker has committed."""
    complete: dict[int, int] = field(default_factory=dict)
    """The last step whose gradients each worker has pushed completely."""
    applied: dict[int, int] = field(default_factory=dict)
    """The last step of each worker that was applied: a repeated step is recognised by it."""

    def come(self, worker: int, connection: int, passed: int) -> None:
        """Add a connected worker that has completed all steps up to `passed`."""
        self.absent.discard(worker)
        self.live[worker] = connection
        self.committed[worker] = max(passed, self.applied.get(worker, 0))
        self.complete[worker] = self.committed[worker]

    def go(self, worker: int, connection: int) -> bool:
        """Remove a worker whose connection ended; return False where it has connected again already."""
        if self.live.get(worker) != connection:
            return False
        del self.live[worker]
        return True

    @property
    def gathered(self) -> bool:
        """Whether all expected workers have connected, or the wait for them has ended."""
        if self.absent and self.absent_until is not None and time.monotonic() >= self.absent_until:
            self.absent.clear()
        return not self.absent

    @property
    def patience(self) -> float | None:
        """Seconds after which `gathered` may change without a new connection."""
        if not self.absent or self.absent_until is None:
            return None
        return max(0.0, self.absent_until - time.monotonic())

    def all_have(self, steps: dict[int, int], seq: int) -> bool:
        """Whether all connected workers have reached `seq`."""
        return self.gathered and all(steps.get(worker, 0) >= seq for worker in self.live)

    def ahead(self, worker: int) -> int:
        """Return how many steps a worker is ahead of the slowest connected one."""
        others = [self.committed[other] for other in self.live] + [0 for _ in self.absent]
        return self.committed[worker] - min(others, default=self.committed[worker])

    def start_of(self, worker: int, clock: int, *, together: bool) -> int:
        """Return the step after which a worker that connects continues."""
        if together or not self.live:
            return max(clock if together else 0, self.applied.get(worker, 0))
        return max(min(self.committed[other] for other in self.live), self.applied.get(worker, 0))

    def to_dict(self) -> dict[str, Any]:
        """Return what is saved for a restored shard."""
        return {"live": sorted(self.live), "applied": [[worker, seq] for worker, seq in self.applied.items()]}

    @classmethod
    def restored(cls, saved: dict[str, Any], seconds: float) -> WorkerTable:
        """Return a table that waits some seconds for the workers that were connected when the state was saved."""
        applied = {int(worker): int(seq) for worker, seq in saved["applied"]}
        return cls(set(saved["live"]), time.monotonic() + seconds, applied=applied)


@dataclass
class ShardStats:
    """Figures of one shard since it started."""

    bytes_in: int = 0
    bytes_out: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    """Seconds spent adding up gradients and stepping."""
    updates: int = 0
    stale_sum: int = 0
    stale_max: int = 0
    """Updates by other workers between a worker's pull and the update that it computed from it."""
    ahead_max: int = 0
    """How many steps a worker was ahead of the slowest when it could continue."""
    late: int = 0
    """Contributions that arrived after their step was taken, and were dropped."""
    saves: int = 0
    began: float = field(default_factory=time.monotonic)
    _first_update: float = 0.0
    _last_update: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def received(self, kind: str, size: int) -> None:
        """Count a request; each connection has a separate thread."""
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
        """Updates per second between the first and the last one."""
        seconds = self._last_update - self._first_update
        return (self.updates - 1) / seconds if self.updates > 1 and seconds > 0 else 0.0

    def stale(self, updates: int) -> None:
        """Count the updates between a worker's pull and its own update."""
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


@dataclass(frozen=True)
class Rules:
    """How updates are made, and how a shard's state is saved."""

    workers: int
    """Workers that are expected at the start; later ones may join and leave."""
    mode: Literal["sync", "async", "bounded"] = "sync"
    staleness: int = 0
    """bounded: how many steps a worker may be ahead of the slowest."""
    folder: Path | None = None
    """Where the shards save their states; None: only in the shard's `slots`, where it has them."""
    save_every: int = 0
    """Number of updates between saves, which precede the acknowledgement; 0: by time."""
    save_seconds: float = 30.0
    """Seconds between saves if save_every is 0; more if saving takes more than 1/20 of the time."""
    rejoin_seconds: float = 10.0
    """How long a restored shard waits for the workers it had before it continues without them."""


@dataclass(frozen=True)
class ShardSpec:
    """Everything that a shard is started with."""

    number: int
    placement: Placement
    optimizer: torch.optim.Optimizer
    """The workers' optimizer, of which only class and settings are kept."""
    rules: Rules
    token: str
    slots: StateSlots | None = None
    """Storage for the state that lasts as long as the process that starts the shard."""

    def __post_init__(self) -> None:
        # In the worker's process: a forked child cannot read a learning rate on a GPU.
        object.__setattr__(self, "optimizer", pattern_of(self.optimizer))

    @property
    def storage(self) -> StateFile | StateSlots | None:
        """Where the shard's state is saved; None: the state of a failed shard is lost."""
        folder = self.rules.folder
        return self.slots or (None if folder is None else StateFile(folder / f"shard-{self.number}"))
