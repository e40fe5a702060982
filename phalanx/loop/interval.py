"""`checkpoint_frequency = "auto"`: the steps between two checkpoints, from what they cost and how often ranks fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from phalanx.observe.format import duration, span
from phalanx.observe.goodput import LAUNCHED_AT
from phalanx.reliability import PRESETS, best_interval

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation

_WARM_STEPS = 3
_FIRST_STEPS = 10
"""The first checkpoint comes early: what it costs is not known before."""
_CHANGE = 1.5
"""The interval is changed, and the user is informed, where the best one is longer or shorter by this factor."""
_KEPT_COSTS = 5
_PUBLISHED = PRESETS["rsc-1"]


class AutoInterval:
    """The interval that wastes the least time by Young and Daly; equal on all ranks.

    Rank 0 measures what a save stalls and what a step takes. Failures are those of "auto 12h", else those that
    this launch has seen, else those of a published cluster with as many GPUs as there are ranks.
    """

    def __init__(self, formation: Formation, clock: Callable[[], float] = time.monotonic) -> None:
        self._formation = formation
        self._clock = clock
        self._mtbf_setting = formation.config.mtbf_seconds
        self.failures = formation.world.env.failures
        """How often this launch has failed; a change of the number of ranks on request is not a failure."""
        self._steps: int | None = None
        self._next: int | None = None
        self._mark = (0, 0.0)
        self._stalled = 0.0
        self._costs: list[float] = []

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step; every rank asks after every step."""
        if self._next is None:
            self._next = step - 1 + _FIRST_STEPS
            self._mark = (step - 1 + _WARM_STEPS, 0.0)
        if step == self._mark[0]:
            self._mark = (step, self._clock())
        return step >= self._next

    def saved(self, step: int, stalled: float) -> str:
        """Decide on the next checkpoint after a save; all ranks call this. Returns a note where the interval changes.

        `stalled`: seconds that checkpoints have stalled this rank so far; those of the main rank count.
        """
        interval, note = self._wanted(step, stalled) if self._formation.is_main else (0, "")
        interval = int(self._formation.reduce(torch.tensor(interval), "sum"))
        is_new = interval and (self._steps is None or not 1 / _CHANGE < interval / self._steps < _CHANGE)
        if is_new:
            self._steps = interval
        self._mark = (step, self._clock())
        self._next = step + (self._steps or _FIRST_STEPS)
        return note if is_new else ""

    def _wanted(self, step: int, stalled: float) -> tuple[int, str]:
        """Return the best number of steps and why; 0 where no step was measured yet."""
        cost, self._stalled = stalled - self._stalled, stalled
        self._costs = [*self._costs[1 - _KEPT_COSTS :], max(cost, 1e-4)]
        steps, began = step - self._mark[0], self._mark[1]
        if steps <= 0 or not began:
            return 0, ""
        step_seconds = max(1e-6, (self._clock() - began - cost) / steps)
        cost = sorted(self._costs)[len(self._costs) // 2]
        mtbf, source = self._mtbf()
        seconds = best_interval(cost, mtbf)
        interval = max(1, round(seconds / step_seconds))
        often = (
            f"a checkpoint every {interval:,} step{'s' * (interval > 1)} (about {duration(interval * step_seconds)})"
        )
        return interval, f"{often}: a save stalls {cost:.2g} s, and a failure is expected every {source}"

    def _mtbf(self) -> tuple[float, str]:
        if self._mtbf_setting is not None:
            return self._mtbf_setting, f"{span(self._mtbf_setting)} (as given)"
        if self.failures:
            ran = max(1.0, time.time() - float(os.environ.get(LAUNCHED_AT) or time.time()))
            times = f"{self.failures} failure{'s' * (self.failures > 1)}"
            return ran / self.failures, f"{span(ran / self.failures)} ({times} in {span(ran)})"
        ranks = self._formation.world_size
        mtbf = _PUBLISHED.mtbf(ranks)
        return mtbf, f"{span(mtbf)} (as on a published cluster; what yours has: checkpoint_frequency = 'auto 12h')"
