"""Compression by sending some of the values: the largest (`topk`) or a random choice (`randomk`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Self

import torch

from phalanx.comm.compress import average, generator, is_finite
from phalanx.comm.compress.feedback import FeedbackCompressor
from phalanx.comm.exchange import Bucket, Exchange
from phalanx.config import DistributedConfig

_LARGEST_INT32 = 2**31 - 1


class _Sparse(FeedbackCompressor):
    """Sends a share of the values, `ratio` of them."""

    def __init__(self, ratio: float, *, seed: int = 0, warmup: int = 0) -> None:
        super().__init__(seed=seed, warmup=warmup)
        self.ratio = ratio

    @classmethod
    def of(cls, config: DistributedConfig, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> Self:
        """Return the compressor with the share of values that a config names."""
        return cls(config.compression_ratio, seed=config.seed, warmup=config.compression_warmup)


class TopK(_Sparse):
    """Each rank sends its largest values to all, so the bytes grow with the number of ranks."""

    name = "topk"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        residual = self.residuals.of(bucket)
        gradient = residual + bucket.flat
        # NaN counts as largest, so all ranks get it in the sum.
        indices = gradient.abs().topk(count_kept(self.ratio, gradient.numel()), sorted=False).indices
        values = gradient[indices].to(bucket.flat.dtype)
        gathered = exchange.all_gather(_packed(values, indices, gradient.numel()))
        total = torch.zeros_like(gradient)
        for message in gathered:  # by rank: indices are unique within one, so the order of additions is the same
            their_values, their_indices = _unpacked(message, values.dtype, gradient.numel())
            total[their_indices] += their_values
        bucket.flat.copy_(total.div_(exchange.size))
        if is_finite(bucket.flat):
            gradient[indices] -= values
            residual.copy_(gradient)


def count_kept(ratio: float, count: int) -> int:
    """Return how many numbers of a bucket are sent: at least one."""
    return min(count, max(1, math.ceil(ratio * count)))


def _index_type(count: int) -> torch.dtype:
    return torch.int32 if count <= _LARGEST_INT32 else torch.int64


def _packed(values: torch.Tensor, indices: torch.Tensor, count: int) -> torch.Tensor:
    """Return values and indices in one message: one latency instead of two."""
    return torch.cat([values.view(torch.uint8), indices.to(_index_type(count)).view(torch.uint8)])


def _unpacked(message: torch.Tensor, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    index_type = _index_type(count)
    length = message.numel() // (dtype.itemsize + index_type.itemsize)
    cut = length * dtype.itemsize
    return message[:cut].clone().view(dtype), message[cut:].clone().view(index_type).long()


class RandomK(_Sparse):
    """A random choice of values, equal on all ranks, averaged by a plain all-reduce."""

    name = "randomk"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        residual = self.residuals.of(bucket)
        gradient = residual + bucket.flat
        count = gradient.numel()
        indices = _draw(count, count_kept(self.ratio, count), (self.seed, self.steps, bucket.index)).to(gradient.device)
        # Zero, or NaN where any value is not finite: all ranks must see it, also where it is not drawn.
        mark = torch.linalg.vector_norm(gradient, math.inf) * 0
        values = (gradient[indices] + mark).to(bucket.flat.dtype)
        sent = values.clone()
        average(values, exchange)
        bucket.flat.zero_()[indices] = values
        if is_finite(values):
            gradient[indices] -= sent
            residual.copy_(gradient)


def _draw(count: int, chosen: int, key: tuple[int, ...]) -> torch.Tensor:
    """Draw one index from each of `kept` equal ranges: all differ, and the cost depends on `kept` only."""
    edges = torch.arange(chosen + 1) * count // chosen
    within = torch.rand(chosen, generator=generator(torch.device("cpu"), *key), dtype=torch.float64)
    return edges[:-1] + (within * edges.diff()).long()
