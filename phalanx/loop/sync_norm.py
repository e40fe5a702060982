"""Synchronised batch norm: mean and variance over the samples of all ranks, on any device.

torch's SyncBatchNorm computes on GPUs alone, and counts the placeholder that keeps a rank without samples in step.
Layers stay the same objects: their names, hooks, parameters and running statistics are those of batch norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class NormRanks:
    """The ranks over which a norm takes its statistics."""

    group: dist.ProcessGroup | None
    size: int
    is_placeholder: Callable[[], bool]
    """Whether this rank has no sample in the current micro-step: what it computes counts for nothing."""


_RANKS: WeakKeyDictionary[nn.Module, NormRanks] = WeakKeyDictionary()
"""Not attributes of the layers: a copy or a pickle of a model has no process group."""


def synchronise(model: nn.Module, ranks: NormRanks) -> tuple[int, Callable[[], None]]:
    """Let a model's batch norms take their statistics over the ranks; return how many, and what undoes it."""
    norms = {module: type(module) for module in model.modules() if type(module) in _NORMS}
    for norm in norms:
        norm.__class__ = SyncedBatchNorm
        _RANKS[norm] = ranks
    return len(norms), partial(_undo, norms)


def _undo(norms: dict[nn.Module, Any]) -> None:
    for norm, kind in norms.items():
        norm.__class__ = kind
        _RANKS.pop(norm, None)


class SyncedBatchNorm(nn.BatchNorm2d):
    """Batch norm of one to three dimensions that normalises by the samples of all ranks when it trains."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions: the layer may have been one of another."""

    # The whole method: where torch.compile traces into it, norms of equal shape get no gradient.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input; all ranks must call this."""
        ranks = _RANKS.get(self)
        if ranks is None or not self.training:
            return super().forward(input)
        return _train(self, input, ranks)


def _train(norm: SyncedBatchNorm, inputs: Tensor, ranks: NormRanks) -> Tensor:
    output, mean, variance = _Normalise.apply(inputs, norm.weight, norm.bias, norm.eps, ranks)  # type: ignore[no-untyped-call]
    if norm.running_mean is not None and norm.running_var is not None:
        assert norm.num_batches_tracked is not None, "torch keeps all three or none"
        norm.num_batches_tracked.add_(1)
        for average, new in ((norm.running_mean, mean), (norm.running_var, variance)):
            # Without a momentum the mean of all batches; the count stays on the device.
            share = 1.0 / norm.num_batches_tracked.to(average.dtype) if norm.momentum is None else norm.momentum
            average.lerp_(new.to(average.dtype), share)
    return cast("Tensor", output)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) x weight + bias; also returns the mean and the unbiased variance.

    Each rank sends its mean m, its sum of squares s around it and its count n. With M the mean of all, the squares
    around M are the sum of s + n (m - M)^2, which loses no digits where the mean is large.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: NormRanks
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.rows = 0 if ranks.is_placeholder() else inputs.numel() // inputs.shape[1]
        mean, variance, total = _statistics(inputs, ctx.rows, ranks)
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        shift = None if bias is None else bias.to(mean.dtype)
        output = F.batch_norm(inputs, mean, variance, scale, shift, training=False, eps=eps)
        ctx.save_for_backward(inputs, scale, mean, variance, total)
        ctx.eps, ctx.ranks, ctx.dtype = eps, ranks, None if weight is None else weight.dtype
        unbiased = variance * (total / (total - 1).clamp_min(1))
        ctx.mark_non_differentiable(mean, unbiased)
        return output, mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        inputs, scale, mean, variance, total = ctx.saved_tensors
        # With mean and variance as constants; what they add is the same for all ranks but for x.
        gradients = torch.ops.aten.native_batch_norm_backward(
            gradient, inputs, scale, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        for_inputs, for_scale, for_shift = gradients
        sums = torch.stack([for_scale, for_shift])
        dist.all_reduce(sums, group=ctx.ranks.group)
        if ctx.rows:  # a placeholder has no part in mean and variance
            inverse = torch.rsqrt(variance + ctx.eps)
            factors = scale * inverse / total * torch.stack([inverse * sums[0], sums[1]])
            along, constant, centre = (_as_channels(factor, inputs) for factor in (*factors, mean))
            for_inputs = for_inputs - torch.addcmul(constant, inputs - centre, along).to(for_inputs.dtype)
        if ctx.dtype is None:
            return for_inputs, None, None, None, None
        return for_inputs, for_scale.to(ctx.dtype), for_shift.to(ctx.dtype), None, None


def _statistics(inputs: Tensor, rows: int, ranks: NormRanks) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and number of the values of each channel over all ranks."""
    values = inputs if inputs.dtype == torch.float64 else inputs.float()
    variance, mean = torch.var_mean(values, [0, *range(2, inputs.ndim)], correction=0)
    statistics = torch.cat([mean, variance * rows, mean.new_full((1,), rows)])
    gathered = statistics.new_empty(ranks.size, len(statistics))
    dist.all_gather_into_tensor(gathered, statistics[None], group=ranks.group)
    means, squares, counts = torch.split(gathered, [len(mean), len(mean), 1], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (squares + counts * (means - mean).square()).sum(0) / total
    return mean, variance, total


def _as_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.ndim - 2))
