"""What the language models return, and their loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LMOutput(NamedTuple):
    """Loss and logits. A named tuple, because DDP, FSDP and pytrees see through it."""

    loss: Tensor
    logits: Tensor


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, vocabulary] logits; targets of -100 do not count."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision loses digits in the sum
    return F.cross_entropy(precise.flatten(0, 1), targets.flatten())
