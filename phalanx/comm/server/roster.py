"""Who takes part, and how far each has come: what decides when a step may be taken and who has to wait."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Roster:
    """Workers by number. A step of a worker has a number too, larger than all before it (`seq`)."""

    absent: set[int]
    """Workers that are expected and have not come yet: until they do, nobody steps without them."""
    absent_until: float | None = None
    """When to go on without them (monotonic seconds); None: never."""
    live: dict[int, int] = field(default_factory=dict)
    """Workers that are here, with the number of their connection."""
    committed: dict[int, int] = field(default_factory=dict)
    """The last step that each has handed over."""
    complete: dict[int, int] = field(default_factory=dict)
    """The last step whose gradients each has pushed to the end."""
    applied: dict[int, int] = field(default_factory=dict)
    """The last step of each that has been applied: what comes a second time is known by it."""

    def come(self, worker: int, connection: int, passed: int) -> None:
        """Note a worker that has connected and has all steps up to `passed` behind it."""
        self.absent.discard(worker)
        self.live[worker] = connection
        self.committed[worker] = max(passed, self.applied.get(worker, 0))
        self.complete[worker] = self.committed[worker]

    def go(self, worker: int, connection: int) -> bool:
        """Note a connection that ended; False where the worker has another one already."""
        if self.live.get(worker) != connection:
            return False
        del self.live[worker]
        return True

    @property
    def gathered(self) -> bool:
        """Whether everyone who is expected has come, or has been waited for long enough."""
        if self.absent and self.absent_until is not None and time.monotonic() >= self.absent_until:
            self.absent.clear()
        return not self.absent

    @property
    def patience(self) -> float | None:
        """Seconds after which `gathered` may change by itself."""
        if not self.absent or self.absent_until is None:
            return None
        return max(0.0, self.absent_until - time.monotonic())

    def all_have(self, steps: dict[int, int], seq: int) -> bool:
        """Whether everyone who is here has come as far as `seq`."""
        return self.gathered and all(steps.get(worker, 0) >= seq for worker in self.live)

    def ahead(self, worker: int) -> int:
        """Return how many steps a worker is ahead of the slowest one that is here."""
        others = [self.committed[other] for other in self.live] + [0 for _ in self.absent]
        return self.committed[worker] - min(others, default=self.committed[worker])

    def start_of(self, worker: int, clock: int, *, together: bool) -> int:
        """Return the step after which a worker that comes (again) goes on."""
        if together or not self.live:
            return max(clock if together else 0, self.applied.get(worker, 0))
        return max(min(self.committed[other] for other in self.live), self.applied.get(worker, 0))

    def to_dict(self) -> dict[str, Any]:
        """Return what a restored shard must know."""
        return {"live": sorted(self.live), "applied": [[worker, seq] for worker, seq in self.applied.items()]}

    @classmethod
    def restored(cls, saved: dict[str, Any], seconds: float) -> Roster:
        """Expect those who were here when the state was saved, for some seconds."""
        applied = {int(worker): int(seq) for worker, seq in saved["applied"]}
        return cls(set(saved["live"]), time.monotonic() + seconds, applied=applied)
