"""An ability of some strategies: an engine that is not ours runs backward and the optimizer's step.

The loop stays the same. It hands the scaled loss to the engine instead of to autograd, and the step at a boundary to
the engine instead of to the optimizer; precision and the scaling of fp16 are the engine's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn


class OwnsStep(ABC):
    """What a strategy adds when its engine, and not the loop, owns gradients and steps."""

    keeps_precision: ClassVar[bool] = True
    """Whether mixed precision is the engine's own; else the loop runs forward under autocast as always."""
    keeps_gradients: ClassVar[bool] = True
    """Whether gradients are out of sight; else each parameter's `.grad` holds this rank's own until the step."""

    @abstractmethod
    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Build the engine from the wrapped model and its optimizer; return the optimizer that will step."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss that is scaled already; at a boundary, leave it averaged over the ranks."""

    @abstractmethod
    def divide_gradients(self, divisor: torch.Tensor) -> None:
        """Divide the averaged gradient, at a boundary, by what its losses were weighted with."""

    @abstractmethod
    def step(self) -> None:
        """Take the step that `clip_grad_norm` and `divide_gradients` have prepared."""

    @abstractmethod
    def hand_back(self, wrapped: nn.Module) -> None:
        """Give the user's model its whole weights back; all ranks call this, at the end of a run that succeeded."""

    @abstractmethod
    def detach(self) -> None:
        """Let go of the engine without talking to other ranks, which may be gone."""
