"""What the loop tells about one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class StepInfo:
    """One optimizer step, as the loop yields it. Reading `loss` waits for the device; the rest is free."""

    step: int
    epoch: int
    samples: int
    learning_rate: float
    loss_tensor: torch.Tensor

    @property
    def loss(self) -> float:
        """This rank's mean loss over the step's last micro-batch."""
        return float(self.loss_tensor)
