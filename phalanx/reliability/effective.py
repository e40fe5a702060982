"""Effective training time in closed form, by Young and Daly.

Failures come at random with a mean time between them. A job that restarts loses its work since the last checkpoint and
the time of the restart; a job that recovers in place loses the time of the recovery and at most one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PARTS = ("productive", "checkpoint", "lost", "recovery")


def best_interval(checkpoint_cost: float, mtbf: float) -> float:
    """Return the seconds of work between two checkpoints that waste the least time (Daly's higher-order estimate).

    Its first term is Young's: the square root of twice the cost times the mean time between failures.
    """
    if checkpoint_cost >= 2 * mtbf:
        return mtbf
    ratio = checkpoint_cost / (2 * mtbf)
    work = math.sqrt(2 * checkpoint_cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_cost
    return max(work, checkpoint_cost)


@dataclass(frozen=True)
class Process:
    """A job that fails and recovers; all times in seconds."""

    mtbf: float
    """Mean time between failures of the whole job."""
    checkpoint_cost: float
    """How long training stands still for a checkpoint."""
    interval: float
    """Work between two checkpoints."""
    recovery: float
    """From a failure to the first step after it: detection, restart, loading; or recovery in place."""
    lost: float | None = None
    """Work lost per failure, where that does not depend on checkpoints (in place: one step); None: since the last."""

    def expected(self) -> dict[str, float]:
        """Return the expected shares of wall time for productive work, checkpoints, lost work and recovery."""
        cycle = self.interval + self.checkpoint_cost
        # Failures during a recovery begin it again.
        per_failure = self.mtbf * math.expm1(self.recovery / self.mtbf)
        if self.lost is None:
            failures = math.expm1(cycle / self.mtbf)  # per cycle that comes to its end
            lost = failures * self.mtbf - cycle
        else:
            failures = cycle / (self.mtbf - self.lost)
            lost = failures * self.lost
        parts = (self.interval, self.checkpoint_cost, lost, failures * per_failure)
        return {name: part / sum(parts) for name, part in zip(PARTS, parts, strict=True)}
