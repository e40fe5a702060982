"""int8 with stochastic rounding: a quarter of the bytes, and right on average, so that no error needs to be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.comm.compress.base import Compressor, generator, wide
from phalanx.comm.compress.two_phases import average_in_two_phases

if TYPE_CHECKING:
    from phalanx.comm.bucket import Bucket
    from phalanx.comm.exchange import Exchange

BLOCK = 512
"""Numbers that share a scale: layers whose gradients differ in size do not spoil each other's."""
_SCALE_BYTES = 4
_LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny


class _Int8Codec:
    """Blocks of int8, then the blocks' scales. A block with a NaN or an infinity has such a scale, and stays spoilt."""

    granule = BLOCK

    def __init__(self, randomness: torch.Generator) -> None:
        self._randomness = randomness

    def encode(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        blocks = rows.view(rows.shape[0], -1, BLOCK)
        scales = (blocks.abs().amax(-1) / _LARGEST).float()
        steps = blocks / scales.unsqueeze(-1).clamp(min=_TINY)
        noise = torch.rand(blocks.shape, generator=self._randomness, device=rows.device)
        whole = steps.add_(noise).floor_().nan_to_num_(0, 0, 0).clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        return torch.cat([whole.flatten(1).view(torch.uint8), scales.view(torch.uint8)], 1)

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        width = message.shape[1] * BLOCK // (BLOCK + _SCALE_BYTES)
        whole = message[:, :width].view(torch.int8).to(dtype).view(message.shape[0], -1, BLOCK)
        scales = message[:, width:].contiguous().view(torch.float32).to(dtype)
        return (whole * scales.unsqueeze(-1)).flatten(1)


class Int8(Compressor):
    """Eight bits a number."""

    name = "int8"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        randomness = generator(bucket.flat.device, self.seed, self.steps, bucket.index, exchange.rank)
        result, _, _ = average_in_two_phases(wide(bucket.flat), exchange, _Int8Codec(randomness))
        bucket.flat.copy_(result)
