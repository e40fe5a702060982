"""A decoder-only transformer in the shape of Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import model as contract
from phalanx.errors import ModelError
from phalanx.zoo.models.attention import DocumentMask, InnerAttention, RopeScaling, mixed_heads, rotary_table, rotate
from phalanx.zoo.models.decoder import Decoder, DecoderConfig
from phalanx.zoo.models.init import from_preset
from phalanx.zoo.models.loss import LMOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig(DecoderConfig):
    """The shape of a Llama. `kv_heads` < `heads`: each key and value serves heads / kv_heads queries."""

    layers: int = 4
    kv_heads: int = 2
    hidden: int = 48
    ffn_hidden: int = 96
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_weights: bool = False

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ModelError(
                f"hidden={self.hidden} cannot be split into heads={self.heads} of even size, as rotary positions need: "
                f"it must be a multiple of {2 * self.heads}."
            )
        if self.heads % self.kv_heads:
            raise ModelError(f"heads={self.heads} cannot share kv_heads={self.kv_heads}: it must be a multiple.")

    @property
    def head_dim(self) -> int:
        """The features of one head."""
        return self.hidden // self.heads

    def dimensions(self) -> dict[str, Any]:
        """Return the sizes by which `phalanx plan` knows it."""
        more = {"kv_heads": self.kv_heads, "ffn_hidden": self.ffn_hidden}
        return {**DecoderConfig.dimensions(self), **more, "gated_mlp": True, "biases": False, "rms_norm": True}

    def attention_weights(self) -> int:
        """Return the weights of one attention: query and output, and narrower key and value."""
        return 2 * self.hidden**2 + 2 * self.hidden * self.kv_heads * self.head_dim

    def layer_weights(self) -> int:
        """Return attention + 3 hidden x ffn_hidden."""
        return self.attention_weights() + 3 * self.hidden * self.ffn_hidden

    def num_parameters(self) -> int:
        """Return layers x (matrices + 2 hidden) + hidden + embedding and (untied) head."""
        layers = self.layers * (self.layer_weights() + 2 * self.hidden)
        return layers + self.hidden + self.vocab_size * self.hidden * (1 if self.tie_weights else 2)


_LLAMA3 = LlamaConfig(vocab_size=128_256, seq_len=8192, rope_theta=500_000.0, heads=32, kv_heads=8, hidden=4096)
_LLAMA32 = replace(_LLAMA3, seq_len=131_072, rope_scaling=RopeScaling(factor=32.0), ffn_hidden=8192, tie_weights=True)
PRESETS = {
    "debug": LlamaConfig(),
    "small": LlamaConfig(seq_len=256, layers=6, heads=6, kv_heads=2, hidden=384, ffn_hidden=1024),
    "1b": replace(_LLAMA32, layers=16, hidden=2048),
    "3b": replace(_LLAMA32, layers=28, hidden=3072, heads=24),
    "7b": LlamaConfig(
        vocab_size=32_000, seq_len=4096, layers=32, heads=32, kv_heads=32, hidden=4096, ffn_hidden=11_008
    ),
    "8b": replace(_LLAMA3, layers=32, ffn_hidden=14_336),
    "70b": replace(_LLAMA3, layers=80, heads=64, hidden=8192, ffn_hidden=28_672),
}
"""About 0.1 and 10 million parameters, then the shapes of Llama 3.2 1B and 3B, Llama 2 7B, Llama 3 8B and 70B."""


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        shared = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, shared, bias=False)
        self.value = nn.Linear(config.hidden, shared, bias=False)
        self.inner = InnerAttention(causal=True)
        self.project = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, inputs: Tensor, table: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """Mix each position with those before it; `table` holds the positions' cosines and sines."""
        query, key = (rotate(self._heads(layer(inputs)), table) for layer in (self.query, self.key))
        mixed = mixed_heads(self.inner, query, key, self._heads(self.value(inputs)), mask)
        return cast("Tensor", self.project(mixed.flatten(2)))

    def _heads(self, features: Tensor) -> Tensor:
        # -1: under tensor parallelism this rank has some of the heads only.
        return features.view(*features.shape[:2], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: one linear layer gates another, a third projects back."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        self.down = nn.Linear(config.ffn_hidden, config.hidden, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Refine each position by itself."""
        return cast("Tensor", self.down(F.silu(self.gate(inputs)) * self.up(inputs)))


class Block(nn.Module):
    """One layer: attention and a feed-forward net, each with its norm before and its residual around."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.feed = FeedForward(config)

    def forward(self, hidden: Tensor, table: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """Refine [batch, time, hidden]."""
        hidden = hidden + self.attention(self.attention_norm(hidden), table, mask)
        return cast("Tensor", hidden + self.feed(self.feed_norm(hidden)))


class Llama(Decoder):
    """Token embeddings, a stack of blocks, and a score for every token of the vocabulary."""

    config: LlamaConfig

    residual = ("project", "down")

    def __init__(self, config: LlamaConfig) -> None:
        embed = nn.Embedding(config.vocab_size, config.hidden)
        layers = [Block(config) for _ in range(config.layers)]
        super().__init__(config, embed, layers, nn.RMSNorm(config.hidden, eps=config.norm_eps))

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
        table = self.table(positions)
        hidden = tokens if self.embed is None else self.stream(self.embed(tokens))
        for layer in self.layers:
            if layer is not None:
                hidden = layer(hidden, table, mask)
        return self.finish(hidden, targets)

    def table(self, positions: Tensor) -> Tensor:
        """Return the rotary cosines and sines, computed once for all layers.

        They are not a buffer: `to(bfloat16)` would round a buffer, `to_empty` would leave it unset.
        """
        config = self.config
        return rotary_table(positions, config.head_dim, config.rope_theta, config.rope_scaling)

    def tensor_plan(self) -> dict[str, str]:
        """Return which module is split how under tensor parallelism, in the terms of `models.contract`."""
        return {
            "embed": contract.EMBEDDING_ROWWISE,
            "layers.*.attention_norm": contract.SEQUENCE,
            "layers.*.attention": contract.GATHER,
            "layers.*.attention.query": contract.COLWISE,
            "layers.*.attention.key": contract.COLWISE,
            "layers.*.attention.value": contract.COLWISE,
            "layers.*.attention.project": contract.ROWWISE,
            "layers.*.feed_norm": contract.SEQUENCE,
            "layers.*.feed": contract.GATHER,
            "layers.*.feed.gate": contract.COLWISE,
            "layers.*.feed.up": contract.COLWISE,
            "layers.*.feed.down": contract.ROWWISE,
            "norm": contract.SEQUENCE,
            "head": contract.HEAD_COLWISE,
        }

    def tensor_divides(self) -> dict[str, int]:
        """Return what the number of tensor-parallel ranks must divide."""
        config = self.config
        return {"heads": config.heads, "kv_heads": config.kv_heads, "ffn_hidden": config.ffn_hidden}


def llama(preset: str = "debug", **changes: Any) -> Llama:
    """Return a Llama of a preset's shape, with some of its `LlamaConfig` fields changed."""
    return Llama(from_preset("llama", PRESETS, preset, changes))
