"""randomk: numbers at places that all ranks draw alike, so that no places travel; with error feedback."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from phalanx.comm.compress.base import average, generator, is_finite
from phalanx.comm.compress.feedback import SelectingCompressor
from phalanx.comm.compress.topk import count_kept

if TYPE_CHECKING:
    from phalanx.comm.bucket import Bucket
    from phalanx.comm.exchange import Exchange


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
