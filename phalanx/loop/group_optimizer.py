"""The base of the optimizers of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class GroupOptimizer(torch.optim.Optimizer):
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

    def _new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        raise NotImplementedError  # each optimizer has its own

    def _step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        raise NotImplementedError  # each optimizer has its own
