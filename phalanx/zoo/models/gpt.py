"""A decoder-only transformer in the shape of GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from phalanx import model as contract
from phalanx.errors import ModelError
from phalanx.zoo.models.attention import Block
from phalanx.zoo.models.decoder import Decoder, DecoderConfig
from phalanx.zoo.models.init import from_preset
from phalanx.zoo.models.loss import LMOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig(DecoderConfig):
    """The shape of a GPT."""

    dropout: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ModelError(f"hidden={self.hidden} cannot be split into heads={self.heads}: it must be a multiple.")

    def num_parameters(self) -> int:
        """Return layers x (12 hidden^2 + 13 hidden) + (vocab_size + seq_len + 2) x hidden; less without biases."""
        layer = 12 * self.hidden**2 + (13 if self.bias else 2) * self.hidden
        ends = (self.vocab_size * (1 if self.tie_weights else 2) + self.seq_len) * self.hidden
        return self.layers * layer + ends + (2 if self.bias else 1) * self.hidden

    def dimensions(self) -> dict[str, Any]:
        """Return the sizes by which `phalanx plan` knows it."""
        more = {"positions": self.seq_len, "biases": self.bias, "rms_norm": not self.bias}
        return {**DecoderConfig.dimensions(self), **more}

    def layer_weights(self) -> int:
        """Return 12 hidden^2."""
        return 12 * self.hidden**2


PRESETS = {
    "debug": GPTConfig(),
    "small": GPTConfig(seq_len=256, layers=6, heads=6, hidden=384),
    "gpt2": GPTConfig(vocab_size=50257, seq_len=1024, layers=12, heads=12, hidden=768),
    "gpt2-medium": GPTConfig(vocab_size=50257, seq_len=1024, layers=24, heads=16, hidden=1024),
    "gpt2-large": GPTConfig(vocab_size=50257, seq_len=1024, layers=36, heads=20, hidden=1280),
    "gpt2-xl": GPTConfig(vocab_size=50257, seq_len=1024, layers=48, heads=25, hidden=1600),
}
"""About 0.1, 11, 124, 355, 774 and 1558 million parameters."""
PRESETS["1.5b"] = PRESETS["gpt2-xl"]


class Embedding(nn.Module):
    """The sum of a token's and its position's vector."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.seq_len, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return [batch, time, hidden] for tokens [batch, time] at positions [time] or [batch, time]."""
        return cast("Tensor", self.dropout(self.tokens(tokens) + self.positions(positions)))


class GPT(Decoder):
    """Token and position embeddings, a stack of blocks, and a score for every token of the vocabulary."""

    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        hidden, bias, eps = config.hidden, config.bias, config.norm_eps
        options: dict[str, Any] = {"causal": True, "bias": bias, "eps": eps, "dropout": config.dropout, "gelu": "tanh"}
        layers = [Block(hidden, config.heads, 4 * hidden, **options) for _ in range(config.layers)]
        super().__init__(config, Embedding(config), layers, nn.LayerNorm(hidden, eps=eps, bias=bias))

    def token_embedding(self) -> nn.Embedding | None:
        """Return the token half of the embedding."""
        return self.embed.tokens if isinstance(self.embed, Embedding) else None

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor | LMOutput:
        """Return the logits [batch, time, vocab_size]; with targets (-100: ignored) the mean cross-entropy as well.

        A stage without `embed` takes hidden states for tokens. `positions` [time] places a slice of a longer sequence.
        Tokens do not see those of other `documents` [batch, time], and positions restart in each.
        """
        positions, mask = self.packed(tokens, positions, documents)
        hidden = tokens
        if self.embed is not None:
            hidden = self.stream(self.embed(tokens, positions))
        for layer in self.layers:
            if layer is not None:
                hidden = layer(hidden, mask)
        return self.finish(hidden, targets)

    def tensor_plan(self) -> dict[str, str]:
        """Return which module is split how under tensor parallelism, in the terms of `models.contract`."""
        return {
            "embed.tokens": contract.EMBEDDING_ROWWISE,
            "embed.positions": contract.EMBEDDING_POSITIONS,
            "layers.*.attention_norm": contract.SEQUENCE,
            "layers.*.attention": contract.GATHER,
            "layers.*.attention.qkv": contract.COLWISE,
            "layers.*.attention.project": contract.ROWWISE,
            "layers.*.feed_norm": contract.SEQUENCE,
            "layers.*.feed": contract.GATHER,
            "layers.*.feed.expand": contract.COLWISE,
            "layers.*.feed.project": contract.ROWWISE,
            "norm": contract.SEQUENCE,
            "head": contract.HEAD_COLWISE,
        }

    def tensor_divides(self) -> dict[str, int]:
        """Return what the number of tensor-parallel ranks must divide."""
        return {"heads": self.config.heads, "ffn_hidden": 4 * self.config.hidden}


def gpt(preset: str = "debug", **changes: Any) -> GPT:
    """Return a GPT of a preset's shape, with some of its `GPTConfig` fields changed."""
    return GPT(from_preset("gpt", PRESETS, preset, changes))
