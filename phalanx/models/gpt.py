"""A decoder-only transformer in the shape of GPT-2."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import ModelError, UsageError, unknown_name


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
    tie_weights: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ModelError(f"width={self.width} cannot be split into heads={self.heads}: it must be a multiple.")


PRESETS = {
    "debug": GPTConfig(),
    "small": GPTConfig(block_size=256, layers=6, heads=6, width=384),
    "gpt2": GPTConfig(vocab_size=50257, block_size=1024, layers=12, heads=12, width=768),
}
"""About 0.1, 11 and 124 million parameters."""


class GPTOutput(NamedTuple):
    """What a GPT returns when it knows the targets. A named tuple, because DDP, FSDP and pytrees see through it."""

    loss: Tensor
    logits: Tensor


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.project = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Mix each position with those before it: [batch, time, width] in and out."""
        batch, time, width = inputs.shape
        qkv = self.qkv(inputs).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return cast("Tensor", self.project(mixed.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    """One layer: attention and a feed-forward net, each with its norm before and its residual around."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.feed_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.expand = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.project = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Refine [batch, time, width]."""
        attended = inputs + self.dropout(self.attention(self.attention_norm(inputs)))
        hidden = F.gelu(self.expand(self.feed_norm(attended)), approximate="tanh")
        return cast("Tensor", attended + self.dropout(self.project(hidden)))


class GPT(nn.Module):
    """Token and position embeddings, a stack of blocks, and a score for every token of the vocabulary."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.block_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights anew, also after a start on the meta device: N(0, 0.02), residual outputs narrower."""
        if self.config.tie_weights and self.head.weight is not self.token_embedding.weight:
            self.head.weight = self.token_embedding.weight  # here, because Module.to_empty parts the two
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=residual if name.endswith("project") else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    @overload
    def forward(self, tokens: Tensor, targets: None = None) -> Tensor: ...

    @overload
    def forward(self, tokens: Tensor, targets: Tensor) -> GPTOutput: ...

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor | GPTOutput:
        """Return the logits [batch, time, vocab_size]; with targets (-100: ignored) the mean cross-entropy as well."""
        time = tokens.shape[1]
        if time > self.config.block_size:
            raise ModelError(f"a sequence of {time} tokens is longer than block_size={self.config.block_size}.")
        positions = torch.arange(time, device=tokens.device)
        hidden = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        if targets is None:
            return logits
        return GPTOutput(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), logits)

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Count the parameters, shared ones once; without embeddings, those that multiply every token."""
        total = sum(parameter.numel() for parameter in self.parameters())
        if embeddings:
            return total
        looked_up = self.position_embedding.weight.numel()
        # A tied token embedding is the output matrix as well, and does multiply.
        return total - looked_up - (0 if self.config.tie_weights else self.token_embedding.weight.numel())

    def flops_per_token(self, time: int | None = None) -> int:
        """Return the floating-point operations of training on one token: forward and backward, attention not halved."""
        config = self.config
        attention = 12 * config.layers * config.width * (time or config.block_size)
        return 6 * self.num_parameters(embeddings=False) + attention

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue `tokens` [batch, time] by `count` tokens; temperature 0 takes the likeliest one each time."""
        was_training = self.training
        self.eval()
        try:
            for _ in range(count):
                logits = self(tokens[:, -self.config.block_size :])[:, -1].float()
                tokens = torch.cat([tokens, _choose(logits, temperature, top_k, generator)], dim=1)
        finally:
            self.train(was_training)
        return tokens


def gpt(preset: str = "debug", **changes: int | float | bool) -> GPT:
    """Return a GPT of a preset's shape, with some of its `GPTConfig` fields changed."""
    if preset not in PRESETS:
        raise UsageError(unknown_name("GPT preset", preset, PRESETS))
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    for change in changes:
        if change not in fields:
            raise UsageError(unknown_name("option of model 'gpt'", change, ["preset", *fields]))
    return GPT(dataclasses.replace(PRESETS[preset], **changes))  # type: ignore[arg-type]


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    scaled = logits / temperature
    if top_k is not None:
        least = scaled.topk(min(top_k, scaled.shape[-1])).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    return torch.multinomial(scaled.softmax(dim=-1), 1, generator=generator)
