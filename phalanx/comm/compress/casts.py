"""fp16 and bf16: half the bytes. Sums are computed in float32, which a plain all-reduce of halves does not do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.comm.compress.base import Compressor, wide
from phalanx.comm.compress.two_phases import average_in_two_phases

if TYPE_CHECKING:
    from phalanx.comm.bucket import Bucket
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
    """Half precision: 11 bits of mantissa, up to 65504. What is larger becomes infinite, as under loss scaling."""

    name = "fp16"
    dtype = torch.float16


class BF16(_Cast):
    """bfloat16: the range of float32 with 8 bits of mantissa."""

    name = "bf16"
    dtype = torch.bfloat16
