"""An encoder and a decoder in the shape of T5: relative positions, norms without mean, attention without scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import model as contract
from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import ModelError, unknown_name
from phalanx.zoo.models.decoder import Decoder
from phalanx.zoo.models.generation import LOOK_EVERY, Sampling
from phalanx.zoo.models.init import from_preset, is_meta
from phalanx.zoo.models.loss import LMHead, LMOutput, scored, token_loss
from phalanx.zoo.t5_tokens import T5_END, T5_PAD

ACTIVATIONS = ("relu", "gated-gelu")


@dataclass(frozen=True, kw_only=True, slots=True)
class T5Config:
    """The shape of a T5. `layers` are as many in the encoder as in the decoder.

    `activation`: "relu" and tied weights for the first T5, "gated-gelu" and a separate head for T5 1.1 and ByT5.
    """

    vocab_size: int = 384
    seq_len: int = 128
    layers: int = 2
    heads: int = 4
    head_dim: int = 16
    hidden: int = 64
    ffn_hidden: int = 128
    activation: str = "gated-gelu"
    buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.0
    norm_eps: float = 1e-6
    tie_weights: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ModelError(unknown_name("activation", self.activation, ACTIVATIONS, of="a T5"))

    def num_parameters(self) -> int:
        """Return embedding and head, both stacks with their tables of distances, and the norms."""
        attention = 4 * self.hidden * self.heads * self.head_dim
        feed = (3 if self.activation == "gated-gelu" else 2) * self.hidden * self.ffn_hidden
        layers = self.layers * (3 * attention + 2 * feed + 5 * self.hidden)
        embedding = self.vocab_size * self.hidden * (1 if self.tie_weights else 2)
        return layers + embedding + 2 * (self.buckets * self.heads + self.hidden)


_FIRST: dict[str, Any] = {"vocab_size": 32_128, "seq_len": 512, "head_dim": 64, "dropout": 0.1}
PRESETS = {
    "debug": T5Config(),
    "mini": T5Config(layers=4, hidden=256, head_dim=64, ffn_hidden=512),
    "small": T5Config(**_FIRST, layers=8, heads=6, hidden=512, ffn_hidden=1024),
    "base": T5Config(**_FIRST, layers=12, heads=12, hidden=768, ffn_hidden=2048),
    "large": T5Config(**_FIRST, layers=24, heads=16, hidden=1024, ffn_hidden=2816),
}
"""About 0.3 and 8 million parameters over bytes, then T5 1.1: 77, 248 and 783 million."""


class Attention(nn.Module):
    """Attention of several heads whose scores are not scaled; the initial weights are, instead."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        inner = config.heads * config.head_dim
        self.query, self.key, self.value = (nn.Linear(config.hidden, inner, bias=False) for _ in range(3))
        self.project = nn.Linear(inner, config.hidden, bias=False)

    def forward(self, inputs: Tensor, seen: Tensor, memory: Tensor | None = None) -> Tensor:
        """Mix the positions of `memory` (default: the inputs); `seen` is added to the scores, or says which count."""
        source = inputs if memory is None else memory
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query(inputs), self.key(source), self.value(source))
        )
        seen = seen if seen.dtype is torch.bool else seen.to(query.dtype)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout, scale=1.0)
        return cast("Tensor", self.project(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, which a third one may gate."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.expand = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        gated = config.activation == "gated-gelu"
        self.up = nn.Linear(config.hidden, config.ffn_hidden, bias=False) if gated else None
        self.project = nn.Linear(config.ffn_hidden, config.hidden, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Refine each position by itself."""
        inner = self.expand(inputs)
        inner = F.relu(inner) if self.up is None else F.gelu(inner, approximate="tanh") * self.up(inputs)
        return cast("Tensor", self.project(self.dropout(inner)))


class Layer(nn.Module):
    """Self-attention, in a decoder attention to the encoder's output, and a feed-forward net; norms come first."""

    def __init__(self, config: T5Config, *, decodes: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.cross_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps) if decodes else None
        self.cross = Attention(config) if decodes else None
        self.feed_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.feed = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, seen: Tensor, memory: Tensor | None = None, memory_seen: Tensor | None = None
    ) -> Tensor:
        """Refine [batch, time, hidden]."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), seen))
        if self.cross is not None and self.cross_norm is not None:
            hidden = hidden + self.dropout(self.cross(self.cross_norm(hidden), memory_seen, memory))
        return cast("Tensor", hidden + self.dropout(self.feed(self.feed_norm(hidden))))


class Stack(nn.Module):
    """Layers that share one table of what a distance adds to the scores, and a norm at the end.

    The table is a linear layer over one-hot buckets: tensor parallelism splits it by heads as any other.
    """

    def __init__(self, config: T5Config, *, decodes: bool) -> None:
        super().__init__()
        self.decodes, self.buckets, self.max_distance = decodes, config.buckets, config.max_distance
        self.bias = nn.Linear(config.buckets, config.heads, bias=False)
        self.layers = nn.ModuleList(Layer(config, decodes=decodes) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, seen: Tensor, *memory: Tensor) -> Tensor:
        """Refine [batch, time, hidden]; `seen` [batch or 1, 1, time or 1, time]: which positions count."""
        scores = self._bias_of_distances(seen.shape[-1], hidden.device).masked_fill(~seen, -torch.inf)
        hidden = self.dropout(hidden)
        for layer in self.layers:
            hidden = layer(hidden, scores, *memory)
        return cast("Tensor", self.dropout(self.norm(hidden)))

    def _bias_of_distances(self, time: int, device: torch.device) -> Tensor:
        """Return what is added to the score of each (query, key), [heads, time, time].

        It is computed once per distance from key to query. With time = 3 the distances are -2 -1 0 1 2, and each
        query has a window of them: the last one -2 -1 0, the one before it -1 0 1, the first one 0 1 2.
        """
        distances = torch.arange(1 - time, time, device=device)
        buckets = distance_buckets(distances, self.buckets, self.max_distance, both_sides=not self.decodes)
        bias: Tensor = self.bias(F.one_hot(buckets, self.buckets).to(self.bias.weight.dtype))
        # The gradient of a window sums in its own type: time many numbers, too many for 16 bits.
        precise = bias.to(torch.promote_types(bias.dtype, torch.float32))
        return precise.T.unfold(1, time, 1).flip(1).to(bias.dtype)


def distance_buckets(distance: Tensor, buckets: int, max_distance: int, *, both_sides: bool) -> Tensor:
    """Return the bucket of each distance from a key to its query: one for each small one, then ever wider ones.

    With `both_sides` half of the buckets are for keys after the query; else these share the bucket of distance 0.
    """
    first = torch.zeros_like(distance)
    if both_sides:
        buckets //= 2
        first = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    growth = torch.log(distance.clamp(min=1) / exact) / math.log(max_distance / exact)
    wide = (exact + growth * (buckets - exact)).long().clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, wide)


class T5(nn.Module):
    """One embedding, an encoder that sees a whole text, and a decoder that writes another one token by token.

    forward(tokens, targets) as the trainer calls it: the targets (-100: not asked for) are what is to be written, each
    is predicted from those before it. Tokens of 0 are padding.
    """

    takes_split_logits: ClassVar[bool] = True

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.sequence_shards = 1
        """Into how many slices of the sequence the hidden states between layers are split (sequence parallelism)."""
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.encoder = Stack(config, decodes=False)
        self.memory = nn.Identity()
        """The encoder's output passes through it: tensor parallelism gathers it there, once for all layers."""
        self.decoder = Stack(config, decodes=True)
        self.head = LMHead(config.hidden, config.vocab_size, bias=False)
        self.tie()
        if not is_meta(self):
            self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights as T5's authors did: 1 / sqrt(inputs), for queries also / sqrt(width of a head)."""
        self.tie()
        nn.init.normal_(self.embed.weight, std=1.0)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not (module is self.head and self.config.tie_weights):
                inputs = self.config.hidden if name.endswith(".bias") else module.in_features
                scale = self.config.head_dim if name.endswith(".query") else 1
                nn.init.normal_(module.weight, std=(inputs * scale) ** -0.5)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    def tie(self) -> None:
        """Make the head use the embedding's matrix, where the config wants it: `Module.to_empty` separates the two."""
        if self.config.tie_weights:
            self.head.weight = self.embed.weight

    def encode(self, tokens: Tensor) -> Tensor:
        """Return the encoder's output [batch, time, hidden] for texts."""
        counts = (tokens != T5_PAD)[:, None, None, :]
        return cast("Tensor", self.memory(self.encoder(Decoder.stream(self.embed(tokens)), counts)))

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        written: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> Tensor | LMOutput:
        """Return the logits [batch, time, vocab_size] of the targets, and the mean cross-entropy.

        Without targets: the logits of what follows each token that is already `written`, which begins with a 0.
        `memory`: the output of `encode` for the tokens, where it is known already.
        """
        if targets is not None:
            written = F.pad(targets[:, :-1].masked_fill(targets[:, :-1] == IGNORED_LABEL, T5_PAD), (1, 0), value=T5_PAD)
        if written is None:
            raise ModelError(
                "a T5 needs what is to be written, or the beginning of it.",
                hint="Give targets, or call write(tokens, count). Command line: phalanx predict RUN --prompt TEXT",
            )
        memory = self.encode(tokens) if memory is None else memory
        time = written.shape[1]
        past = torch.ones(time, time, dtype=torch.bool, device=tokens.device).tril()[None, None]
        counts = (tokens != T5_PAD)[:, None, None, :]
        hidden = self.decoder(Decoder.stream(self.embed(written)), past, memory, counts)
        if self.config.tie_weights:
            hidden = hidden * self.config.hidden**-0.5
        return scored(self.head, hidden, targets, trains=self.training, is_split=self.sequence_shards > 1)

    def loss_from_output(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy; targets of -100 do not count."""
        return token_loss(output, target)

    def num_parameters(self) -> int:
        """Count the parameters, shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def compile_regions(self) -> list[tuple[nn.Module, str]]:
        """Return what torch.compile compiles: the layers, once for those of each stack."""
        return [(layer, "forward") for stack in (self.encoder, self.decoder) for layer in stack.layers]

    def tensor_plan(self) -> dict[str, str]:
        """Return which module is split how under tensor parallelism, in the terms of `models.contract`."""
        layer = {"attention_norm": contract.SEQUENCE, "feed_norm": contract.SEQUENCE, "feed": contract.GATHER}
        layer |= {"feed.expand": contract.COLWISE, "feed.project": contract.ROWWISE}
        if self.config.activation == "gated-gelu":
            layer["feed.up"] = contract.COLWISE
        attention = {"": contract.GATHER, ".project": contract.ROWWISE}
        attention |= dict.fromkeys((".query", ".key", ".value"), contract.COLWISE)
        encoder = layer | {f"attention{part}": word for part, word in attention.items()}
        decoder = encoder | {f"cross{part}": word for part, word in attention.items()}
        decoder["cross_norm"] = contract.SEQUENCE
        plan = {"embed": contract.EMBEDDING_ROWWISE, "memory": contract.GATHER, "head": contract.HEAD_COLWISE}
        for stack, parts in (("encoder", encoder), ("decoder", decoder)):
            plan |= {f"{stack}.layers.*.{part}": word for part, word in parts.items()}
            plan |= {f"{stack}.norm": contract.SEQUENCE, f"{stack}.bias": contract.COLWISE}
        return plan

    def tensor_divides(self) -> dict[str, int]:
        """Return what the number of tensor-parallel ranks must divide."""
        return {"heads": self.config.heads, "ffn_hidden": self.config.ffn_hidden}

    @torch.no_grad()
    def write(
        self,
        tokens: Tensor,
        count: int,
        *,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return what the model writes for each text, at most `count` tokens [batch, time]; 0 after its end."""
        was_training, sampling = self.training, sampling or Sampling(temperature=0)
        written = tokens.new_full((tokens.shape[0], 1), T5_PAD)
        ended = torch.zeros_like(written, dtype=torch.bool)
        # The first call encodes: in forward, before which FSDP gathers the embedding.
        memory: list[Tensor] = []
        encoded = self.memory.register_forward_hook(lambda _, __, output: memory.append(output))
        self.eval()
        try:
            for number in range(count):
                logits = self(tokens, written=written, memory=next(iter(memory), None))[:, -1].float()
                token = sampling.draw(logits, generator).masked_fill(ended, T5_PAD)
                written = torch.cat([written, token], dim=1)
                ended |= token == T5_END
                if (number + 1) % LOOK_EVERY == 0 and bool(ended.all()):
                    break
        finally:
            encoded.remove()
            self.train(was_training)
        return written[:, 1:]


def t5(preset: str = "debug", **changes: Any) -> T5:
    """Return a T5 of a preset's shape, with some of its `T5Config` fields changed."""
    return T5(from_preset("t5", PRESETS, preset, changes))
