"""The output and loss of a language model."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LMOutput(NamedTuple):
    """Loss and logits. A named tuple, because DDP, FSDP and pytrees can traverse it."""

    loss: Tensor
    logits: Tensor


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, vocabulary] logits; targets of -100 do not count.

    The logits may be split by vocabulary over tensor-parallel ranks: then they are not gathered.
    """
    if type(logits) is not Tensor:
        from phalanx.models.sharded_loss import is_split, split_token_loss, whole_logits

        if is_split(logits):
            return split_token_loss(logits, targets)
        logits = whole_logits(logits)
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision loses digits in the sum
    return F.cross_entropy(precise.flatten(0, 1), targets.flatten())


def visible_logits(logits: Tensor, *, with_loss: bool) -> Tensor:
    """Return the logits for the caller: whole, unless the model trains by its own loss and does not need them whole."""
    if type(logits) is Tensor or (with_loss and torch.is_grad_enabled()):
        return logits
    from phalanx.models.sharded_loss import whole_logits

    return whole_logits(logits)
