"""The output and loss of a language model; over logits that are split by vocabulary no rank ever holds all of them."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from phalanx.config.fields import IGNORED_LABEL


class LMOutput(NamedTuple):
    """Loss and logits. A named tuple, because DDP, FSDP and pytrees can traverse it."""

    loss: Tensor
    logits: Tensor


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, vocabulary] logits; targets of -100 do not count.

    The logits may be split by vocabulary over tensor-parallel ranks: then they are not gathered.
    """
    if type(logits) is not Tensor:
        from phalanx.models.loss import is_split, split_token_loss, whole_logits

        if is_split(logits):
            return split_token_loss(logits, targets)
        logits = whole_logits(logits)
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision loses digits in the sum
    return F.cross_entropy(precise.flatten(0, 1), targets.flatten())


def visible_logits(logits: Tensor, *, with_loss: bool) -> Tensor:
    """Return the logits for the caller: whole, unless the model trains by its own loss and does not need them whole."""
    if type(logits) is Tensor or (with_loss and torch.is_grad_enabled()):
        return logits
    from phalanx.models.loss import whole_logits

    return whole_logits(logits)


def is_split(logits: Tensor) -> TypeGuard[DTensor]:
    """Whether a rank holds a part of the vocabulary only, and every rank some of it."""
    if not isinstance(logits, DTensor) or not logits.placements[0].is_shard(logits.ndim - 1):
        return False
    ranks, vocabulary = logits.device_mesh.size(), logits.shape[-1]
    return (ranks - 1) * _share(vocabulary, ranks) < vocabulary


def whole_logits(logits: Tensor) -> Tensor:
    """Gather logits that are split; any others are returned as they are."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def split_token_loss(logits: DTensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, vocabulary] logits, equal on all ranks; -100 does not count."""
    mesh = logits.device_mesh
    first = mesh.get_local_rank() * _share(logits.shape[-1], mesh.size())
    here = logits.to_local().flatten(0, 1)
    loss: Tensor = _SplitCrossEntropy.apply(here, targets.flatten(), first, mesh.get_group())  # type: ignore[no-untyped-call]
    return loss


def _share(vocabulary: int, ranks: int) -> int:
    """Return the number of tokens on all ranks but the last: DTensor splits like `torch.chunk`."""
    return -(-vocabulary // ranks)


class _SplitCrossEntropy(torch.autograd.Function):
    """Two small all-reduces, of one or two numbers per token: the highest logits, then sums and the targets' logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision loses digits in the sum
        highest = logits.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        logits = logits - highest[:, None]
        here = (targets >= first) & (targets < first + logits.shape[-1])
        places = torch.where(here, targets - first, 0)[:, None]
        chosen = torch.where(here, logits.gather(1, places)[:, 0], 0.0)
        shares = logits.exp_()
        sums = torch.stack([shares.sum(-1), chosen])
        dist.all_reduce(sums, group=group)
        counted = targets != IGNORED_LABEL
        count = counted.sum()
        ctx.save_for_backward(shares, sums[0], places, here, counted, count)
        return torch.where(counted, sums[0].log() - sums[1], 0.0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shares, total, places, here, counted, count = ctx.saved_tensors
        weight = torch.where(counted, gradient / count, 0.0)
        found = shares * (weight / total)[:, None]
        found.scatter_add_(1, places, torch.where(here, -weight, 0.0)[:, None])
        return found, None, None, None
