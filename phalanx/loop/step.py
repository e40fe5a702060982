"""One optimizer step, and what a strategy needs to run the passes of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from phalanx.loop.forward import Forward
from phalanx.loop.gradients import Gradients
from phalanx.loop.loss_log import LossLog
from phalanx.loop.precision import Precision
from phalanx.loop.prepare import Prepared
from phalanx.observe.step_clock import StepClock
from phalanx.strategies.tensors import count_rows


class Weighing(NamedTuple):
    """How the micro-batches of a run are weighed."""

    by_labels: bool = False
    """By the labels that count, else by samples: in the loss that is reported."""
    gradients: bool = False
    """Whether the labels also weigh the gradients: those of a step with one micro-batch need no weight."""


class BatchPasses:
    """What `Strategy.train_batch` needs from the loop."""

    def __init__(
        self,
        gradients: Gradients,
        precision: Precision,
        forward: Forward,
        clock: StepClock,
        weight: float | torch.Tensor | None = None,
        *,
        by_labels: bool,
    ) -> None:
        """`weight`: how many units the batch's loss is the mean of; `by_labels`: whether its parts count by labels."""
        self._by_labels = by_labels
        self._gradients = gradients
        self._clock = clock
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
        self._clock.enter("backward")
        self._gradients.backward(loss, self._weight)

    def begin(self) -> float | torch.Tensor:
        """Begin a backward pass that the strategy runs itself; return the factor on its loss."""
        self._clock.enter("backward")
        return self._gradients.enter(self._weight)

    def end(self) -> None:
        """End that backward pass."""
        self._gradients.leave()

    def weigh(self, batch: Any) -> float | torch.Tensor:
        """Return the weight of a part of the batch: its labels that count, or its samples."""
        return self._forward.units(batch) if self._by_labels else float(count_rows(self.target(batch)))


class StepOutcome(NamedTuple):
    """The last micro-batch's loss and the gradient norm where it was asked for; still on the device."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None


def train_step(
    formation: Prepared,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Forward,
    batches: Iterator[Any],
    loss_log: LossLog,
    *,
    weighing: Weighing,
    clip: float | None = None,
    measure_norm: bool = False,
    reseed: Callable[[int, int], None] | None = None,
) -> StepOutcome | None:
    """Pull micro-batches up to the next step boundary and take the step; None when the epoch has none left.

    `reseed`: called with the step and the position of each micro-batch's samples before its forward pass.
    """
    gradients, clock = formation.gradients, formation.clock
    step = gradients.steps + 1
    clock.enter("data")
    for batch in batches:
        clock.enter("forward")
        if reseed is not None:
            reseed(step, gradients.current.offset)
        loss, share = add_micro_batch(formation, model, forward, batch, weighing)
        loss_log.add(step, loss, share)
        if gradients.boundary:
            break
        clock.enter("data")
    else:
        clock.enter("other")
        return None
    loss_log.sum_step()
    norm = finish_step(formation, optimizer, clip=clip, measure_norm=measure_norm)
    return StepOutcome(loss.detach(), norm)


def add_micro_batch(
    formation: Prepared, model: nn.Module, forward: Forward, batch: Any, weighing: Weighing
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Run forward and backward of a micro-batch; return its mean loss, and its samples or labels."""
    gradients = formation.gradients
    share = forward.share(batch, gradients.current.samples, by_labels=weighing.by_labels)
    weight = share if weighing.gradients else None
    passes = BatchPasses(gradients, formation.precision, forward, formation.clock, weight, by_labels=weighing.by_labels)
    return formation.strategy.train_batch(model, batch, passes), share


def finish_step(
    formation: Prepared, optimizer: torch.optim.Optimizer, *, clip: float | None, measure_norm: bool
) -> torch.Tensor | None:
    """Clip, step and drop the gradients; return their norm where it is clipped or measured."""
    gradients = formation.gradients
    formation.clock.enter("optimizer")
    norm = None
    if clip is not None:
        norm = gradients.clip(clip, [optimizer])
    elif measure_norm:
        norm = gradients.norm([optimizer])
    optimizer.step()
    optimizer.zero_grad()
    formation.clock.enter("other")
    return norm
