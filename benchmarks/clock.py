"""The one stopwatch of all contestants: a hook on the optimizer, which every framework has to call."""

from __future__ import annotations

import time
from typing import Any

import torch

_LAST_LOSSES = 20


class StepClock:
    """Times the steps after the warm-up, in total: periodic work of a framework counts with the steps it falls into.

    It looks twice, at the last step of the warm-up and at the last step of all, and waits for the device only then.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup = warmup
        self.steps = steps
        self.taken = 0
        self.first_at = 0.0
        """When the first step was done, by the clock on the wall: the process that started us has the same."""
        self._losses: list[torch.Tensor] = []
        self._began = 0.0
        self._ended = 0.0

    @property
    def total_steps(self) -> int:
        """How many optimizer steps a contestant has to take."""
        return self.warmup + self.steps

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Count and time this optimizer's steps."""
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.tick()

    def tick(self) -> None:
        """Count a step that is done."""
        self.taken += 1
        if self.taken == 1:
            self.first_at = time.time()
        if self.taken == self.warmup:
            self._began = _now()
        elif self.taken == self.total_steps:
            self._ended = _now()

    def note(self, loss: torch.Tensor) -> None:
        """Keep the loss of a step that is not done yet, or is just done, if it is one of the last; without a wait."""
        if self.taken >= self.total_steps - _LAST_LOSSES:
            self._losses.append(loss.detach().clone())  # a CUDA graph writes the next loss to the same place

    @property
    def last_loss(self) -> float:
        """The mean of the last losses."""
        return sum(loss.item() for loss in self._losses) / len(self._losses)

    @property
    def ms_per_step(self) -> float:
        """Milliseconds per step; an error when the contestant took another number of steps than it was given."""
        if self.taken != self.total_steps:
            raise RuntimeError(f"{self.taken} optimizer steps were taken instead of {self.total_steps}")
        return (self._ended - self._began) / self.steps * 1e3


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
