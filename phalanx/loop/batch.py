"""Forward and backward of one batch, whoever runs them: autograd, or a pipeline that has both under way at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import UsageError
from phalanx.loop.forward import count_labels
from phalanx.strategies.batch_rows import count_rows
from phalanx.strategies.pipeline import Pipeline

if TYPE_CHECKING:
    from torch import nn

    from phalanx.loop.formation import Formation
    from phalanx.loop.forward import Forward, LossFn


def train_batch(
    formation: Formation, model: nn.Module, batch: Any, forward: Forward, weight: float | torch.Tensor | None = None
) -> torch.Tensor:
    """Add the gradient of a batch's mean loss, and return that loss; `weight`: how many units it is the mean of."""
    if not isinstance(model, Pipeline):
        with formation.autocast():
            loss = forward.loss(model, batch)
        formation.backward(loss, weight)
        return loss
    if forward.judge is None:
        raise UsageError(
            "a pipeline needs the loss apart from the model: the last stage computes it",
            hint="Give loss_fn=lambda output, target: ..., or the model a method judge(output, target), with "
            "batches of (inputs, targets).",
        )
    factor = formation.gradients.enter(weight)
    loss = model.train_batch(batch, _Loss(forward, forward.judge), factor, formation.autocast)
    formation.gradients.leave()
    return loss


class _Loss:
    """The loss of a part of a batch, and what it counts in the whole: labels where there are any, else samples."""

    def __init__(self, forward: Forward, judge: LossFn) -> None:
        self._forward = forward
        self._judge = judge

    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        return self._judge(output, self._forward.target(batch))

    def weigh(self, batch: Any) -> float | torch.Tensor:
        target = self._forward.target(batch)
        if isinstance(target, torch.Tensor) and not target.is_floating_point():
            return count_labels(target).double()  # shares of it must not be rounded to single precision
        return float(count_rows(target))
