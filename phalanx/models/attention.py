"""Attention and blocks of the reference models, and rotary position embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class InnerAttention(nn.Module):
    """Attention itself, without parameters: [batch, heads, time, head width] three times in, once out.

    It is a separate module, named `inner` in every model, so that ring attention can replace it.
    """

    ring_ready: ClassVar[bool] = True
    """Context parallelism replaces modules that say so, and reads their `causal` and `dropout`."""

    def __init__(self, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal = causal
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix the values; key and value may have fewer heads than query, each then serves a group of query heads."""
        dropout = self.dropout if self.training else 0.0
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
            # Only the half-precision CUDA kernels know groups; the rest would fall back to one that stores all scores.
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            groups = 1
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.causal, enable_gqa=groups > 1
        )


class FusedAttention(nn.Module):
    """Self-attention of several heads, with query, key and value from one multiplication.

    The rows of `qkv` are ordered head by head, (heads, 3, head width): a slice of the rows is a slice of the heads,
    which is what tensor parallelism cuts.
    """

    def __init__(self, hidden: int, heads: int, *, causal: bool, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.inner = InnerAttention(causal=causal, dropout=dropout)
        self.project = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Mix the positions: [batch, time, hidden] in and out."""
        batch, time, _ = inputs.shape
        qkv = self.qkv(inputs).view(batch, time, -1, 3, self.head_dim)  # -1: this rank's heads, perhaps not all
        query, key, value = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        mixed = self.inner(query, key, value).transpose(1, 2)
        return cast("Tensor", self.project(mixed.flatten(2)))


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, hidden: int, ffn_hidden: int, *, bias: bool, gelu: str) -> None:
        super().__init__()
        self.expand = nn.Linear(hidden, ffn_hidden, bias=bias)
        self.project = nn.Linear(ffn_hidden, hidden, bias=bias)
        self.gelu = gelu

    def forward(self, inputs: Tensor) -> Tensor:
        """Refine each position by itself."""
        return cast("Tensor", self.project(F.gelu(self.expand(inputs), approximate=self.gelu)))


class Block(nn.Module):
    """One layer of GPT and ViT: attention and a feed-forward net, each with a norm before it and a residual around it.

    `gelu` is "none" for the exact function, "tanh" for GPT-2's approximation.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn_hidden: int,
        *,
        causal: bool,
        eps: float,
        dropout: float,
        bias: bool = True,
        gelu: str = "none",
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden, eps=eps, bias=bias)
        self.attention = FusedAttention(hidden, heads, causal=causal, bias=bias, dropout=dropout)
        self.feed_norm = nn.LayerNorm(hidden, eps=eps, bias=bias)
        self.feed = FeedForward(hidden, ffn_hidden, bias=bias, gelu=gelu)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Refine [batch, time, hidden]."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return cast("Tensor", hidden + self.dropout(self.feed(self.feed_norm(hidden))))


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of slow frequencies by `factor`, for contexts beyond `original_seq_len`.

    Frequencies that turn at least `high` times within the original context stay; those that turn at most `low` times
    are divided by `factor`; those between are blended.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_seq_len: int = 8192


def rotary_table(positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return cosines and sines, float32 [2, time, head width], of the angles position / theta^(2i / head width)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is not None:
        turns = scaling.original_seq_len * frequencies / (2 * math.pi)
        keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        frequencies = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    angles = positions.to(torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (i, i + head width / 2) of [batch, heads, time, head width] by their position's angles."""
    cosines, sines = table.to(heads.dtype).unbind(0)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines
