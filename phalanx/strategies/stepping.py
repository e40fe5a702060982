"""An ability of strategies whose ranks step by themselves and meet now and then: they are told of every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class StepsAlone(ABC):
    """What a strategy adds when gradients are not averaged: each rank's step is its own, until the ranks meet."""

    @abstractmethod
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step; all ranks are told at the same steps, also of those that a rank skipped."""
