"""One optimizer step, readable from top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.loop.batch import train_batch
from phalanx.loop.forward import count_labels

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from phalanx.loop.formation import Formation
    from phalanx.loop.forward import Forward
    from phalanx.loop.ledger import LossLedger


class StepOutcome(NamedTuple):
    """The last micro-batch's loss and the gradient norm where it was asked for; still on the device."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None


def train_step(
    formation: Formation,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Forward,
    batches: Iterator[Any],
    ledger: LossLedger,
    *,
    by_tokens: bool = False,
    clip: float | None = None,
    measure_norm: bool = False,
) -> StepOutcome | None:
    """Pull micro-batches up to the next step boundary and take the step; None when the epoch has none left."""
    step = formation.step + 1
    gradients = formation.gradients
    for batch in batches:
        share: float | torch.Tensor = gradients.current.scale
        if by_tokens:
            share = count_labels(forward.target(batch)) if gradients.current.samples else 0.0
        loss = train_batch(formation, model, batch, forward, share if by_tokens else None)
        ledger.add(step, loss, share)
        if formation.at_boundary:
            break
    else:
        return None
    norm = None
    if clip is not None:
        norm = formation.clip_grad_norm(clip)
    elif measure_norm:
        norm = formation.grad_norm()
    optimizer.step()
    optimizer.zero_grad()
    return StepOutcome(loss, norm)
