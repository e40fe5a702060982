"""A decoder-only transformer in the shape of GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, overload

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import ModelError
from phalanx.models import contract as words
from phalanx.models.attention import FusedAttention
from phalanx.models.decoder import Decoder
from phalanx.models.init import from_preset, init_transformer, is_meta
from phalanx.models.loss import LMOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of a GPT."""

    vocab_size: int = 256
    block_size: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64
    dropout: float = 0.0
    bias: bool = True
    norm_eps: float = 1e-5
    tie_weights: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ModelError(f"width={self.width} cannot be split into heads={self.heads}: it must be a multiple.")

    def num_parameters(self) -> int:
        """Return layers x (12 width^2 + 13 width) + (vocab_size + block_size + 2) x width; less without biases."""
        layer = 12 * self.width**2 + (13 if self.bias else 2) * self.width
        ends = (self.vocab_size * (1 if self.tie_weights else 2) + self.block_size) * self.width
        return self.layers * layer + ends + (2 if self.bias else 1) * self.width

    def flops_per_token(self, time: int | None = None) -> int:
        """Return 6 for each weight of a matrix multiplication, 12 x width x time a layer for attention.

        Forward and backward; the causal half of attention that need not be computed is counted, as is usual.
        """
        matrices = self.layers * 12 * self.width**2 + self.vocab_size * self.width
        return 6 * matrices + 12 * self.layers * self.width * (time or self.block_size)


PRESETS = {
    "debug": GPTConfig(),
    "small": GPTConfig(block_size=256, layers=6, heads=6, width=384),
    "gpt2": GPTConfig(vocab_size=50257, block_size=1024, layers=12, heads=12, width=768),
    "gpt2-medium": GPTConfig(vocab_size=50257, block_size=1024, layers=24, heads=16, width=1024),
    "gpt2-large": GPTConfig(vocab_size=50257, block_size=1024, layers=36, heads=20, width=1280),
    "gpt2-xl": GPTConfig(vocab_size=50257, block_size=1024, layers=48, heads=25, width=1600),
}
"""About 0.1, 11, 124, 355, 774 and 1558 million parameters."""
PRESETS["1.5b"] = PRESETS["gpt2-xl"]


class Embedding(nn.Module):
    """The sum of a token's and its position's vector."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.block_size, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return [batch, time, width] for tokens [batch, time] at positions [time]."""
        return cast("Tensor", self.dropout(self.tokens(tokens) + self.positions(positions)))


class FeedForward(nn.Module):
    """Two linear layers, four times as wide between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.project = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Refine each position by itself."""
        return cast("Tensor", self.project(F.gelu(self.expand(inputs), approximate="tanh")))


class Block(nn.Module):
    """One layer: attention and a feed-forward net, each with its norm before and its residual around."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, eps, bias = config.width, config.norm_eps, config.bias
        self.attention_norm = nn.LayerNorm(width, eps=eps, bias=bias)
        self.attention = FusedAttention(width, config.heads, causal=True, bias=bias, dropout=config.dropout)
        self.feed_norm = nn.LayerNorm(width, eps=eps, bias=bias)
        self.feed = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Refine [batch, time, width]."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return cast("Tensor", hidden + self.dropout(self.feed(self.feed_norm(hidden))))


class GPT(Decoder):
    """Token and position embeddings, a stack of blocks, and a score for every token of the vocabulary."""

    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.embed = Embedding(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.tie()
        if not is_meta(self):
            self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights anew, also after a start on the meta device: N(0, 0.02), residual outputs narrower."""
        self.tie()
        init_transformer(self, layers=self.config.layers, residual=["project"])

    def token_embedding(self) -> nn.Embedding | None:
        """Return the token half of the embedding."""
        return self.embed.tokens if isinstance(self.embed, Embedding) else None

    @overload
    def forward(self, tokens: Tensor, targets: None = None, positions: Tensor | None = None) -> Tensor: ...

    @overload
    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> LMOutput: ...

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor | LMOutput:
        """Return the logits [batch, time, vocab_size]; with targets (-100: ignored) the mean cross-entropy as well.

        A stage without `embed` takes hidden states for tokens. `positions` [time] places a slice of a longer sequence.
        """
        hidden = tokens
        if self.embed is not None:
            hidden = self.embed(tokens, self.positions(tokens) if positions is None else positions)
        for layer in self.layers:
            if layer is not None:
                hidden = layer(hidden)
        return self.finish(hidden, targets)

    def tensor_plan(self) -> dict[str, str]:
        """Return which module is split how under tensor parallelism, in the words of `plan_names`."""
        return {
            "embed.tokens": words.EMBEDDING_ROWWISE,
            "embed.positions": words.EMBEDDING_POSITIONS,
            "layers.*.attention_norm": words.SEQUENCE,
            "layers.*.attention": words.GATHER,
            "layers.*.attention.qkv": words.COLWISE,
            "layers.*.attention.project": words.ROWWISE,
            "layers.*.feed_norm": words.SEQUENCE,
            "layers.*.feed": words.GATHER,
            "layers.*.feed.expand": words.COLWISE,
            "layers.*.feed.project": words.ROWWISE,
            "norm": words.SEQUENCE,
            "head": words.HEAD_COLWISE,
        }

    def tensor_divides(self) -> dict[str, int]:
        """Return what the number of tensor-parallel ranks must divide."""
        return {"heads": self.config.heads, "feed_width": 4 * self.config.width}


def gpt(preset: str = "debug", **changes: Any) -> GPT:
    """Return a GPT of a preset's shape, with some of its `GPTConfig` fields changed."""
    return GPT(from_preset("gpt", PRESETS, preset, changes))
