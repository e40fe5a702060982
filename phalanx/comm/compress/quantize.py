"""Compression by fewer bits per value: fp16, bf16, blockwise int8, and sign with one bit and error feedback."""

from __future__ import annotations

import torch

from phalanx.comm.compress import Compressor, generator, is_finite, wide
from phalanx.comm.compress.feedback import FeedbackCompressor, average_in_two_phases
from phalanx.comm.exchange import Bucket, Exchange


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


BLOCK = 512
"""Numbers that share a scale, so that layers with large gradients do not affect others."""
_BITS = 8
_SCALE_BYTES = 4
_LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny


class _Int8Codec:
    """Blocks of int8, then the blocks' scales; a NaN or infinity in a block makes its scale so too."""

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
    """Eight bits per number."""

    name = "int8"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        randomness = generator(bucket.flat.device, self.seed, self.steps, bucket.index, exchange.rank)
        result, _, _ = average_in_two_phases(wide(bucket.flat), exchange, _Int8Codec(randomness))
        bucket.flat.copy_(result)


class _SignCodec:
    """Blocks of bits, eight in a byte, then the blocks' scales, their mean absolute values."""

    granule = BLOCK

    def encode(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        blocks = rows.view(rows.shape[0], -1, BLOCK)
        starts = torch.arange(blocks.shape[1], device=rows.device) * BLOCK
        counts = (lengths.unsqueeze(1) - starts).clamp(1, BLOCK)  # padding must not make the scale smaller
        scales = (blocks.abs().sum(-1) / counts).float()
        bits = (rows >= 0).to(torch.uint8).view(rows.shape[0], -1, _BITS)
        packed = (bits << _shifts(rows.device)).sum(-1, dtype=torch.uint8)
        return torch.cat([packed, scales.view(torch.uint8)], 1)

    def decode(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        width = message.shape[1] * (BLOCK // _BITS) // (BLOCK // _BITS + _SCALE_BYTES)
        bits = (message[:, :width].unsqueeze(-1) >> _shifts(message.device)) & 1
        signs = bits.to(dtype).mul_(2).sub_(1).view(message.shape[0], -1, BLOCK)
        scales = message[:, width:].contiguous().view(torch.float32).to(dtype)
        return (signs * scales.unsqueeze(-1)).flatten(1)


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=device)


class Sign(FeedbackCompressor):
    """One bit per number."""

    name = "sign"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        residual = self.residuals.of(bucket)
        gradient = residual + bucket.flat
        result, decoded, lost = average_in_two_phases(gradient, exchange, _SignCodec())
        bucket.flat.copy_(result)
        if is_finite(result):
            # This rank adds the second phase's error next time, times the ranks, as the average divides by them.
            torch.sub(gradient, decoded, out=residual).add_(lost, alpha=exchange.size)
