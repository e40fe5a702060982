"""Attention and blocks of the reference models, masks of packed documents, and rotary position embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import ModelError


class DocumentMask(NamedTuple):
    """Which keys a query sees where a sequence has several documents: those before it, of its own document.

    A compiled layer on a GPU skips whole blocks of keys (FlexAttention); else torch's attention gets the whole mask.
    """

    documents: Tensor
    """[batch, time]: the number of each token's document."""

    visible: Tensor | None
    """[batch, 1, time, time], boolean; None where a compiled layer uses `blocks`."""

    blocks: Any = None
    """A `BlockMask`, the same for all heads."""


def document_mask(documents: Tensor, *, in_blocks: bool) -> DocumentMask:
    """Return the causal mask of documents [batch, time]; `in_blocks`: for layers that are compiled."""
    if not in_blocks:
        return DocumentMask(documents, seen_tokens(documents))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    batch, time = documents.shape
    blocks = _block_mask(compiled=documents.is_cuda)(sees, batch, None, time, time, device=documents.device)
    return DocumentMask(documents, None, blocks)


@cache
def _block_mask(*, compiled: bool) -> Callable[..., Any]:
    """Return torch's function; as it is written it stores the whole mask first, compiled it does not."""
    from torch.nn.attention.flex_attention import create_block_mask  # imports the compiler

    return torch.compile(create_block_mask, dynamic=False) if compiled else create_block_mask


def seen_tokens(documents: Tensor) -> Tensor:
    """Return the mask of documents [batch, time] as a tensor [batch, 1, time, time]: True where a query sees a key."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril().unsqueeze(1)


def positions_in(documents: Tensor) -> Tensor:
    """Return each token's position in its document: documents 3 3 5 5 5 have the positions 0 1 0 1 2."""
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return places - torch.where(begins, places, 0).cummax(dim=1).values


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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """Mix the values; key and value may have fewer heads than query, each then serves a group of query heads.

        A mask says which keys are seen, and then `causal` says nothing.
        """
        dropout = self.dropout if self.training else 0.0
        if mask is not None and mask.blocks is not None and dropout == 0 and torch.compiler.is_compiling():
            return _in_blocks(query, key, value, mask.blocks)
        seen = None
        if mask is not None:
            seen = seen_tokens(mask.documents) if mask.visible is None else mask.visible
        groups = int(query.shape[1]) // int(key.shape[1])  # in torch's tracer sizes are tensors
        if groups > 1 and query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
            # Only the half-precision CUDA kernels know groups; the rest would fall back to one that stores all scores.
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            groups = 1
        causal = self.causal and seen is None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, dropout_p=dropout, is_causal=causal, enable_gqa=groups > 1
        )


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: Any) -> Tensor:
    """Return the attention over the blocks of keys that are seen at all; other than torch's, it needs equal types."""
    from torch.nn.attention.flex_attention import flex_attention

    key, value = key.to(query.dtype), value.to(query.dtype)
    grouped = query.shape[1] > key.shape[1]
    return flex_attention(query, key, value, block_mask=blocks, enable_gqa=grouped)


def mixed_heads(inner: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: DocumentMask | None) -> Tensor:
    """Return [batch, time, heads, head width]; modules that replace `inner` need not know masks."""
    mixed: Tensor = inner(query, key, value) if mask is None else inner(query, key, value, mask)
    return mixed.transpose(1, 2)


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

    def forward(self, inputs: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """Mix the positions: [batch, time, hidden] in and out."""
        batch, time, _ = inputs.shape
        qkv = self.qkv(inputs).view(batch, time, -1, 3, self.head_dim)  # -1: this rank's heads, perhaps not all
        query, key, value = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        mixed = mixed_heads(self.inner, query, key, value, mask)
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


class DropPath(nn.Module):
    """Leave the branch of a residual out for a share of the samples in training: stochastic depth.

    The branches that stay are divided by the share of samples that keep theirs.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, branch: Tensor) -> Tensor:
        """Return the branch, zero for some of the samples of [batch, ...]."""
        if not self.training or self.share == 0:
            return branch
        kept = branch.new_empty((branch.shape[0],) + (1,) * (branch.ndim - 1)).bernoulli_(1 - self.share)
        return branch * (kept / (1 - self.share))

    def extra_repr(self) -> str:
        """Return the share, which torch prints."""
        return f"drop_prob={self.share}"


def check_drop_path(drop_path: float) -> None:
    """Refuse what is not a share of samples."""
    if not 0 <= drop_path < 1:
        raise ModelError(f"drop_path={drop_path} is not a share of samples: from 0 to below 1.")


def drop_path_shares(drop_path: float, layers: int) -> list[float]:
    """Return the share of each layer: none in the first, `drop_path` in the last, evenly between them."""
    return [drop_path * layer / max(1, layers - 1) for layer in range(layers)]


class Block(nn.Module):
    """One layer of GPT and ViT: attention and a feed-forward net, each with a norm before it and a residual around it.

    `gelu` is "none" for the exact function, "tanh" for GPT-2's approximation. `drop_path`: see `DropPath`.
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
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden, eps=eps, bias=bias)
        self.attention = FusedAttention(hidden, heads, causal=causal, bias=bias, dropout=dropout)
        self.feed_norm = nn.LayerNorm(hidden, eps=eps, bias=bias)
        self.feed = FeedForward(hidden, ffn_hidden, bias=bias, gelu=gelu)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, hidden: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """Refine [batch, time, hidden]."""
        hidden = hidden + self.drop_path(self.dropout(self.attention(self.attention_norm(hidden), mask)))
        return cast("Tensor", hidden + self.drop_path(self.dropout(self.feed(self.feed_norm(hidden)))))


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
    """Return cosines and sines, float32 [2, time, head width], of the angles position / theta^(2i / head width).

    Positions [batch, time] give [2, batch, 1, time, head width].
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is not None:
        turns = scaling.original_seq_len * frequencies / (2 * math.pi)
        keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        frequencies = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    angles = positions.to(torch.float32)[..., None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    table = torch.stack([angles.cos(), angles.sin()])
    return table if positions.ndim == 1 else table.unsqueeze(2)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (i, i + head width / 2) of [batch, heads, time, head width] by their position's angles."""
    cosines, sines = table.to(heads.dtype).unbind(0)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines
