"""Compression by sending some of the values: the largest (`topk`) or a random choice (`randomk`)."""

from __future__ import annotations

import math

import torch

from phalanx.comm.buckets import Bucket
from phalanx.comm.compress.base import average, generator, is_finite
from phalanx.comm.compress.feedback import SelectingCompressor
from phalanx.comm.exchange import Exchange

_LARGEST_INT32 = 2**31 - 1


class TopK(SelectingCompressor):
    """Each rank sends its own largest share to all: the bytes grow with the number of ranks, unlike those of a sum."""

    name = "topk"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        residual = self.residuals.of(bucket)
        wanted = residual + bucket.flat
        # NaN counts as largest, so a spoilt gradient spoils the sum on all ranks and is seen by all.
        places = wanted.abs().topk(count_kept(self.ratio, wanted.numel()), sorted=False).indices
        values = wanted[places].to(bucket.flat.dtype)
        gathered = exchange.all_gather(_packed(values, places, wanted.numel()))
        total = torch.zeros_like(wanted)
        for message in gathered:  # rank by rank: places are unique within one, so additions have one order everywhere
            their_values, their_places = _unpacked(message, values.dtype, wanted.numel())
            total[their_places] += their_values
        bucket.flat.copy_(total.div_(exchange.size))
        if is_finite(bucket.flat):
            wanted[places] -= values
            residual.copy_(wanted)


def count_kept(ratio: float, count: int) -> int:
    """Return how many numbers of a bucket are sent: at least one."""
    return min(count, max(1, math.ceil(ratio * count)))


def _place_type(count: int) -> torch.dtype:
    return torch.int32 if count <= _LARGEST_INT32 else torch.int64


def _packed(values: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """Put values and places in one message: one latency instead of two."""
    return torch.cat([values.view(torch.uint8), places.to(_place_type(count)).view(torch.uint8)])


def _unpacked(message: torch.Tensor, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    place_type = _place_type(count)
    kept = message.numel() // (dtype.itemsize + place_type.itemsize)
    cut = kept * dtype.itemsize
    return message[:cut].clone().view(dtype), message[cut:].clone().view(place_type).long()


class RandomK(SelectingCompressor):
    """A random share of the numbers, added up by a plain all-reduce."""

    name = "randomk"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        residual = self.residuals.of(bucket)
        wanted = residual + bucket.flat
        count = wanted.numel()
        places = _draw(count, count_kept(self.ratio, count), (self.seed, self.steps, bucket.index)).to(wanted.device)
        # Zero, or NaN where any number is spoilt: drawn or not, all ranks must see it.
        mark = torch.linalg.vector_norm(wanted, math.inf) * 0
        values = (wanted[places] + mark).to(bucket.flat.dtype)
        sent = values.clone()
        average(values, exchange)
        bucket.flat.zero_()[places] = values
        if is_finite(values):
            wanted[places] -= sent
            residual.copy_(wanted)


def _draw(count: int, kept: int, key: tuple[int, ...]) -> torch.Tensor:
    """Draw one place from each of `kept` equal stretches: all differ, at the cost of those kept and not of all."""
    edges = torch.arange(kept + 1) * count // kept
    within = torch.rand(kept, generator=generator(torch.device("cpu"), *key), dtype=torch.float64)
    return edges[:-1] + (within * edges.diff()).long()
