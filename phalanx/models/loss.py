"""The output and loss of a language model, without ever holding the logits of all tokens, or of the whole vocabulary.

In training `Head` computes loss and gradients for a chunk of the tokens at a time. Over logits that tensor parallelism
splits by vocabulary, `split_token_loss` adds up what each rank has.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from phalanx.config.fields import IGNORED_LABEL


class LMOutput(NamedTuple):
    """Loss and logits; None for logits in training. A named tuple, because DDP, FSDP and pytrees can traverse it."""

    loss: Tensor
    logits: Tensor | None


class Head(nn.Linear):
    """The output matrix: a score for every token of the vocabulary, or with targets the mean cross-entropy alone."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [batch, time, vocabulary] of [batch, time, hidden], or the loss; targets of -100 do not count.

        With targets the gradients are computed here, so that no logits wait for the backward pass.
        """
        dtype = _compute_dtype(hidden)
        if targets is None or dtype is torch.float16:  # whose unscaled gradients would vanish
            logits = super().forward(hidden)
            return logits if targets is None else token_loss(logits, targets)
        rows = hidden.flatten(0, 1).to(dtype)
        loss: Tensor = _HeadLoss.apply(rows, self.weight, targets.flatten())  # type: ignore[no-untyped-call]
        return loss


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


_CHUNK_LOGITS = 2**28
"""Logits that exist at once: half a gigabyte in bf16, and large enough for matrix products at full speed."""
_MULTIPLE = 64
"""To which a GPU's vocabulary is padded: matrix products of other widths miss the fast kernels (50,257: 0.83x)."""


class _HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden states [tokens, hidden] under a matrix [vocabulary, hidden]; gradients in forward.

    A chunk's logits are turned into their gradient, softmax - one-hot, and that into the gradients of both factors,
    before the next chunk: as many products as usual, none repeated. The scale, 1 / labels that count, comes last.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        vocabulary = weight.shape[0]
        padding = -vocabulary % _MULTIPLE if hidden.is_cuda else 0
        matrix = F.pad(weight.to(hidden.dtype), (0, 0, 0, padding))
        counted = targets != IGNORED_LABEL
        places = targets.where(counted, 0)[:, None]
        chunks = max(1, -(-hidden.shape[0] * vocabulary // _CHUNK_LOGITS))
        precise = torch.promote_types(hidden.dtype, torch.float32)  # half precision loses digits in sums
        parts = zip(*(tensor.chunk(chunks) for tensor in (hidden, places, counted)), strict=True)
        losses, for_hidden, for_weight = [], [], None
        for rows, place, counts in parts:
            logits = (rows @ matrix.t())[:, :vocabulary].to(precise)
            norm = logits.logsumexp(-1, keepdim=True)
            losses.append(((norm - logits.gather(1, place))[:, 0] * counts).sum())
            shares = (logits - norm).exp().scatter_add(1, place, -torch.ones_like(norm)) * counts[:, None]
            gradient = F.pad(shares.to(rows.dtype), (0, padding))
            for_hidden.append(gradient @ matrix)
            share = (gradient.t() @ rows)[:vocabulary]
            for_weight = share if for_weight is None else share.to(precise).add_(for_weight)
        count = counted.sum()
        ctx.save_for_backward(torch.cat(for_hidden), for_weight, count)
        return torch.stack(losses).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        for_hidden, for_weight, count = ctx.saved_tensors
        scale = gradient / count
        return (for_hidden * scale).to(for_hidden.dtype), for_weight * scale, None


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, vocabulary] logits; targets of -100 do not count.

    The logits may be split by vocabulary over tensor-parallel ranks: then they are not gathered.
    """
    if type(logits) is not Tensor:
        if is_split(logits):
            return split_token_loss(logits, targets)
        logits = whole_logits(logits)
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision loses digits in the sum
    return F.cross_entropy(precise.flatten(0, 1), targets.flatten())


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
