"""One optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from phalanx.loop.formation import Formation
from phalanx.loop.forward import BatchPasses, Forward
from phalanx.loop.loss_log import LossLog


class Weighting(NamedTuple):
    """How the micro-batches of a run are weighed."""

    by_labels: bool = False
    """By the labels that count, else by samples: in the loss that is reported."""
    gradients: bool = False
    """Whether the labels also weigh the gradients: those of a step with one micro-batch need no weight."""


class StepOutcome(NamedTuple):
    """The last micro-batch's loss and the gradient norm where it was asked for; still on the device."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None


class StepCapture(Protocol):
    """Takes steps as one CUDA graph once that is possible (`speed/capture.py`)."""

    is_off: bool

    def run(
        self,
        forward: Forward,
        batches: Iterator[Any],
        *,
        weighting: Weighting,
        measure_norm: bool = False,
        reseed: Callable[[int, int], None] | None = None,
    ) -> StepOutcome | None:
        """Take a step, as `train_step` does; None when the epoch has none left."""

    def check(self) -> None:
        """Drop the recording if what it depends on has changed."""

    def drop(self) -> None:
        """Drop the recording."""

    def refuse(self, why: str) -> None:
        """Record no step from here on."""


def train_step(
    formation: Formation,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Forward,
    batches: Iterator[Any],
    loss_log: LossLog,
    *,
    weighting: Weighting,
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
        loss, share = add_micro_batch(formation, model, forward, batch, weighting)
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
    formation: Formation, model: nn.Module, forward: Forward, batch: Any, weighting: Weighting
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Run forward and backward of a micro-batch; return its mean loss, and its samples or labels."""
    gradients = formation.gradients
    share = forward.share(batch, gradients.current.samples, by_labels=weighting.by_labels)
    weight = share if weighting.gradients else None
    in_parts = formation.parts_count_by_labels(by_labels=weighting.by_labels)
    passes = BatchPasses(gradients, formation.precision, forward, formation.clock, weight, by_labels=in_parts)
    return formation.strategy.train_batch(model, batch, passes), share


def finish_step(
    formation: Formation, optimizer: torch.optim.Optimizer, *, clip: float | None, measure_norm: bool
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
