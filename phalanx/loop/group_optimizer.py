"""The base of the optimizers of this package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class GroupOptimizer(torch.optim.Optimizer, ABC):
    """What the optimizers of this package share: states that are made at the first step, and a step group by group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; parameters without a gradient stay."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                if not self.state[parameter]:
                    self.state[parameter] |= self._new_state(parameter)
            if trained:
                self._step_group(group, trained)
        return loss

    @abstractmethod
    def _new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first step."""

    @abstractmethod
    def _step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Take the step of the parameters of a group that have a gradient."""
