"""Rotary position embedding in the rotate-half layout, so that Hugging Face weights need no permutation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of slow frequencies by `factor`, for contexts beyond `original_block_size`.

    Frequencies that turn at least `high` times within the original context stay; those that turn at most `low` times
    are divided by `factor`; those between are blended.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_block_size: int = 8192


def rotary_table(positions: Tensor, head_width: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return cosines and sines, float32 [2, time, head width], of the angles position / theta^(2i / head width)."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions.device) / head_width
    frequencies = 1.0 / theta**exponents
    if scaling is not None:
        frequencies = _stretch(frequencies, scaling)
    angles = positions.to(torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (i, i + head width / 2) of [batch, heads, time, head width] by their position's angles."""
    cosines, sines = table.to(heads.dtype).unbind(0)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_block_size * frequencies / (2 * math.pi)
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies
