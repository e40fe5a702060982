"""sign: one bit per number and a scale per block, with error feedback on both phases."""

from __future__ import annotations

import torch

from phalanx.comm.buckets import Bucket
from phalanx.comm.compress.base import is_finite
from phalanx.comm.compress.feedback import FeedbackCompressor, average_in_two_phases
from phalanx.comm.exchange import Exchange

BLOCK = 512
"""Numbers that share a scale, their mean absolute value."""
_BITS = 8
_SCALE_BYTES = 4


class _SignCodec:
    """Blocks of bits, eight in a byte, then the blocks' scales."""

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
        wanted = residual + bucket.flat
        result, decoded, lost = average_in_two_phases(wanted, exchange, _SignCodec())
        bucket.flat.copy_(result)
        if is_finite(result):
            # This rank adds the second phase's error next time, times the ranks, as the average divides by them.
            torch.sub(wanted, decoded, out=residual).add_(lost, alpha=exchange.size)
