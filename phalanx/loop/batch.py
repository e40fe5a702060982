"""Forward and backward of one batch, as a strategy runs them."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.loop.forward import Forward, count_labels
from phalanx.loop.gradients import Gradients
from phalanx.loop.precision import Precision
from phalanx.strategies.pipeline.loss import count_rows


class BatchPasses:
    """What `Strategy.train_batch` needs of the loop. `weight`: how many units the batch's loss is the mean of."""

    def __init__(
        self, gradients: Gradients, precision: Precision, forward: Forward, weight: float | torch.Tensor | None = None
    ) -> None:
        self._gradients = gradients
        self._forward = forward
        self._weight = weight
        self.autocast = precision.autocast
        self.loss_fn = forward.loss_fn
        self.target = forward.target

    def forward(self, wrapped: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the batch's mean loss."""
        with self.autocast():
            return self._forward.loss(wrapped, batch)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of that loss."""
        self._gradients.backward(loss, self._weight)

    def begin(self) -> float | torch.Tensor:
        """Begin a backward pass that the strategy runs itself; return the factor on its loss."""
        return self._gradients.enter(self._weight)

    def end(self) -> None:
        """End that backward pass."""
        self._gradients.leave()

    def weigh(self, batch: Any) -> float | torch.Tensor:
        """Return how much a part of the batch counts: labels where there are any, else samples."""
        target = self.target(batch)
        if isinstance(target, torch.Tensor) and not target.is_floating_point():
            return count_labels(target).double()  # shares of it must not be rounded to single precision
        return float(count_rows(target))
