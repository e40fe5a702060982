"""The phases of a step on this rank: how long the host spent in each, and ranges for profilers."""

from __future__ import annotations

import time
from collections.abc import Callable

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""What a rank does in a step. `backward` holds the reduction of gradients; `other` is logging, evaluation, saving."""


class StepPhases:
    """Counts seconds by phase. A phase lasts until the next one is entered, so the sum is the wall time.

    On CUDA these are times of the host, which launches work and does not wait for it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self.current = "other"
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.on_enter: Callable[[str], object] | None = None
        """Called with the name of each phase that begins: a profiler marks its ranges by this."""

    def enter(self, name: str) -> None:
        """End the current phase and begin another; called several times per step, so it must stay cheap."""
        now = self._clock()
        self.seconds[self.current] += now - self._since
        self.current, self._since = name, now
        if self.on_enter is not None:
            self.on_enter(name)

    def mark(self, name: str) -> None:
        """Show a profiler that something within the current phase begins: evaluation, a checkpoint, or the rest."""
        if self.on_enter is not None:
            self.on_enter(name)

    @property
    def own(self) -> float:
        """Seconds of work that waits for no other rank: data and forward passes, where replicas hold whole models."""
        return self.seconds["data"] + self.seconds["forward"]
