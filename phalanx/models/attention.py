"""Attention: the core that a context-parallel strategy may replace, and the fused layer of GPT and ViT."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class InnerAttention(nn.Module):
    """Attention proper, without parameters: [batch, heads, time, head width] three times in, once out.

    It is a module of its own, named `inner` in every model, so that ring attention can take its place.
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

    def __init__(self, width: int, heads: int, *, causal: bool, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.inner = InnerAttention(causal=causal, dropout=dropout)
        self.project = nn.Linear(width, width, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Mix the positions: [batch, time, width] in and out."""
        batch, time, _ = inputs.shape
        qkv = self.qkv(inputs).view(batch, time, -1, 3, self.head_width)  # -1: this rank's heads, perhaps not all
        query, key, value = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        mixed = self.inner(query, key, value).transpose(1, 2)
        return cast("Tensor", self.project(mixed.flatten(2)))
