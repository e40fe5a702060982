"""Compression by fewer bits per value: fp16, bf16 and blockwise int8."""

from __future__ import annotations

import torch

from phalanx.comm.buckets import Bucket
from phalanx.comm.compress.base import Compressor, generator, wide
from phalanx.comm.compress.feedback import average_in_two_phases
from phalanx.comm.exchange import Exchange


class _CastCodec:
    granule = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return rows.to(self._dtype).view(torch.uint8)

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return message.view(self._dtype).to(dtype)


class _Cast(Compressor):
    dtype: torch.dtype

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        result, _, _ = average_in_two_phases(wide(bucket.flat), exchange, _CastCodec(self.dtype))
        bucket.flat.copy_(result)


class FP16(_Cast):
    """Half precision: 11 bits of mantissa, up to 65504; larger values become infinite."""

    name = "fp16"
    dtype = torch.float16


class BF16(_Cast):
    """bfloat16: the range of float32 with 8 bits of mantissa."""

    name = "bf16"
    dtype = torch.bfloat16


INT8_BLOCK = 512
"""Numbers that share a scale, so that layers with large gradients do not affect others."""
_SCALE_BYTES = 4
_LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny


class _Int8Codec:
    """Blocks of int8, then the blocks' scales; a NaN or infinity in a block makes its scale so too."""

    granule = INT8_BLOCK

    def __init__(self, randomness: torch.Generator) -> None:
        self._randomness = randomness

    def encode(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        blocks = rows.view(rows.shape[0], -1, INT8_BLOCK)
        scales = (blocks.abs().amax(-1) / _LARGEST).float()
        steps = blocks / scales.unsqueeze(-1).clamp(min=_TINY)
        noise = torch.rand(blocks.shape, generator=self._randomness, device=rows.device)
        whole = steps.add_(noise).floor_().nan_to_num_(0, 0, 0).clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        return torch.cat([whole.flatten(1).view(torch.uint8), scales.view(torch.uint8)], 1)

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        width = message.shape[1] * INT8_BLOCK // (INT8_BLOCK + _SCALE_BYTES)
        whole = message[:, :width].view(torch.int8).to(dtype).view(message.shape[0], -1, INT8_BLOCK)
        scales = message[:, width:].contiguous().view(torch.float32).to(dtype)
        return (whole * scales.unsqueeze(-1)).flatten(1)


class Int8(Compressor):
    """Eight bits per number."""

    name = "int8"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        randomness = generator(bucket.flat.device, self.seed, self.steps, bucket.index, exchange.rank)
        result, _, _ = average_in_two_phases(wide(bucket.flat), exchange, _Int8Codec(randomness))
        bucket.flat.copy_(result)
