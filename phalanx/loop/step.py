"""One optimizer step, readable from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from phalanx.loop.batch import BatchPasses
from phalanx.loop.forward import Forward, count_labels
from phalanx.loop.gradients import Gradients
from phalanx.loop.loss_log import LossLog
from phalanx.loop.precision import Precision
from phalanx.strategies.base import Strategy


class StepOutcome(NamedTuple):
    """The last micro-batch's loss and the gradient norm where it was asked for; still on the device."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None


def train_step(
    gradients: Gradients,
    precision: Precision,
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Forward,
    batches: Iterator[Any],
    ledger: LossLog,
    *,
    by_tokens: bool = False,
    clip: float | None = None,
    measure_norm: bool = False,
) -> StepOutcome | None:
    """Pull micro-batches up to the next step boundary and take the step; None when the epoch has none left."""
    step = gradients.steps + 1
    for batch in batches:
        share: float | torch.Tensor = gradients.current.scale
        if by_tokens:
            share = count_labels(forward.target(batch)) if gradients.current.samples else 0.0
        passes = BatchPasses(gradients, precision, forward, share if by_tokens else None)
        loss = strategy.train_batch(model, batch, passes)
        ledger.add(step, loss, share)
        if gradients.boundary:
            break
    else:
        return None
    norm = None
    if clip is not None:
        norm = gradients.clip(clip, [optimizer])
    elif measure_norm:
        norm = gradients.norm([optimizer])
    optimizer.step()
    optimizer.zero_grad()
    return StepOutcome(loss, norm)
