"""An encoder in the shape of BERT, with the head of its task: masked tokens, classes, numbers, or answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import model as contract
from phalanx.errors import ModelError, UsageError, unknown_name
from phalanx.zoo.models.attention import FeedForward
from phalanx.zoo.models.decoder import Decoder
from phalanx.zoo.models.init import from_preset, init_transformer, is_meta
from phalanx.zoo.models.loss import LMOutput, token_loss, whole_logits

TASKS = ("mlm", "classify", "regress", "qa")
_WIDE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig:
    """The shape of a BERT.

    `task`: "mlm" scores every token of the vocabulary at each position, "classify" each of `classes` for a text,
    "regress" gives a number for a text, and "qa" scores each position as the first and as the last token of an answer.
    """

    task: str = "mlm"
    classes: int = 2
    vocab_size: int = 256
    seq_len: int = 64
    segments: int = 2
    layers: int = 2
    heads: int = 4
    hidden: int = 64
    ffn_hidden: int = 256
    dropout: float = 0.0
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ModelError(unknown_name("task", self.task, TASKS, of="a BERT"))
        if self.hidden % self.heads:
            raise ModelError(f"hidden={self.hidden} cannot be split into heads={self.heads}: it must be a multiple.")

    def layer_weights(self) -> int:
        """Return the matrix weights of one layer: 4 hidden^2 + 2 hidden x ffn_hidden."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.ffn_hidden

    def num_parameters(self) -> int:
        """Return layers x (matrices + 9 hidden + ffn_hidden) + embeddings with their norm + the head of the task."""
        layer = self.layer_weights() + 9 * self.hidden + self.ffn_hidden
        embedding = (self.vocab_size + self.seq_len + self.segments + 2) * self.hidden
        square = self.hidden * (self.hidden + 1)
        heads = {
            "mlm": square + 2 * self.hidden + self.vocab_size,
            "classify": square + (self.hidden + 1) * self.classes,
            "regress": square + self.hidden + 1,
            "qa": 2 * (self.hidden + 1),
        }
        return self.layers * layer + embedding + heads[self.task]

    def flops_per_token(self, time: int | None = None) -> int:
        """Return 6 for each weight that multiplies a token, plus 12 x hidden x time per layer for attention."""
        head = self.hidden**2 + self.vocab_size * self.hidden if self.task == "mlm" else 0
        layers = self.layers * (6 * self.layer_weights() + 12 * self.hidden * (time or self.seq_len))
        return layers + 6 * head


_ENGLISH: dict[str, Any] = {"vocab_size": 30_522, "seq_len": 512, "dropout": 0.1}
PRESETS = {
    "debug": BertConfig(),
    "mini": BertConfig(**_ENGLISH, layers=4, heads=4, hidden=256, ffn_hidden=1024),
    "small": BertConfig(**_ENGLISH, layers=4, heads=8, hidden=512, ffn_hidden=2048),
    "base": BertConfig(**_ENGLISH, layers=12, heads=12, hidden=768, ffn_hidden=3072),
    "large": BertConfig(**_ENGLISH, layers=24, heads=16, hidden=1024, ffn_hidden=4096),
}
"""About 0.1, 11, 29, 110 and 335 million parameters."""


class Embedding(nn.Module):
    """The sum of the vectors of a token, its position and its segment (question or text), normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.seq_len, config.hidden)
        self.segments = nn.Embedding(config.segments, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, segments: Tensor | None) -> Tensor:
        """Return [batch, time, hidden]; without segments every token is of the first one."""
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        segment = self.segments(torch.zeros_like(tokens) if segments is None else segments)
        return cast("Tensor", self.dropout(self.norm(self.tokens(tokens) + positions + segment)))


class Attention(nn.Module):
    """Self-attention of several heads over the positions that are not padding."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.head_dim, self.dropout = config.hidden // config.heads, config.dropout
        self.query, self.key, self.value, self.project = (nn.Linear(config.hidden, config.hidden) for _ in range(4))

    def forward(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """Mix the positions: [batch, time, hidden] in and out; `mask` [batch, 1, 1, time]: True for tokens."""
        heads = (part(inputs).unflatten(-1, (-1, self.head_dim)) for part in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in heads)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return cast("Tensor", self.project(mixed.transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    """Attention and a feed-forward net, each with a residual around it and a norm after that."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.feed = FeedForward(config.hidden, config.ffn_hidden, bias=True, gelu="none")
        self.feed_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Refine [batch, time, hidden]."""
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, mask)))
        return cast("Tensor", self.feed_norm(hidden + self.dropout(self.feed(hidden))))


class TokenHead(nn.Module):
    """A score for every token of the vocabulary, by the embedding's matrix."""

    def __init__(self, config: BertConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.output = nn.Linear(config.hidden, config.vocab_size)
        self.output.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [batch, time, vocab_size]."""
        return cast("Tensor", self.output(self.norm(F.gelu(self.transform(hidden)))))


class TextHead(nn.Module):
    """A score for every class, or one number, from the hidden state of the first token."""

    def __init__(self, config: BertConfig, outputs: int) -> None:
        super().__init__()
        self.pool = nn.Linear(config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.hidden, outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [batch, outputs]."""
        return cast("Tensor", self.output(self.dropout(torch.tanh(self.pool(hidden[:, 0])))))


class Bert(nn.Module):
    """Embeddings, a stack of layers that see both sides, and the head of a task.

    forward(tokens, labels), or by the names that models of transformers have: `token_type_ids` 1 for the second text,
    `attention_mask` 0 for padding, all [batch, time]. Labels are tokens (-100: not asked for), classes, numbers, or for
    "qa" the first and last token of answers; further columns are for metrics.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        if config.task == "mlm":
            self.head: nn.Module = TokenHead(config, self.embed.tokens)
        elif config.task == "qa":
            self.head = nn.Linear(config.hidden, 2)
        else:
            self.head = TextHead(config, config.classes if config.task == "classify" else 1)
        if not is_meta(self):
            self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights again, also after a start on the meta device: N(0, 0.02), as BERT's authors did.

        In narrow models 1/sqrt(hidden): with 0.02 their attention begins as a mean of all tokens, and training waits
        for hundreds of steps until what it sees depends on the question.
        """
        self.tie()
        std = 0.02 if self.config.hidden >= _WIDE else self.config.hidden**-0.5
        init_transformer(self, layers=self.config.layers, residual=[], std=std)

    def tie(self) -> None:
        """Make the head of masked tokens use the embedding's matrix: `Module.to_empty` separates the two."""
        if isinstance(self.head, TokenHead):
            self.head.output.weight = self.embed.tokens.weight

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, *, token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor | LMOutput:  # fmt: skip
        """Return the logits, [batch, time, 2] for "qa"; with labels the mean loss as well."""
        if input_ids.shape[1] > self.config.seq_len:
            raise ModelError(
                f"a sequence of {input_ids.shape[1]} tokens given to a BERT of seq_len={self.config.seq_len}."
            )
        seen = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        hidden = Decoder.stream(self.embed(input_ids, token_type_ids))
        for layer in self.layers:
            hidden = layer(hidden, seen)
        logits: Tensor = self.head(hidden)
        if labels is None:
            return whole_logits(logits)
        return LMOutput(self.loss_from_output(logits, labels), whole_logits(logits))

    def loss_from_output(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy, for "qa" of the first and the last token; for numbers the squared error."""
        if self.config.task == "mlm":
            return token_loss(output, target)
        precise = output.to(torch.promote_types(output.dtype, torch.float32))
        if self.config.task == "regress":
            if target.numel() != len(precise):
                raise ModelError(f"labels {list(target.shape)} for {len(precise)} texts, and each has one number")
            return F.mse_loss(precise.flatten(), target.flatten().to(precise.dtype))
        if self.config.task == "classify":
            if target.is_floating_point():
                raise UsageError(
                    "the labels are fractions, and this BERT scores classes",
                    hint="For a number per text train the recipe bert-regress, or write: --set model.task=regress",
                )
            return F.cross_entropy(precise, target)
        first, last = (F.cross_entropy(precise[..., index], target[:, index]) for index in (0, 1))
        return (first + last) / 2

    def flops_per_token(self, time: int | None = None) -> int:
        """Return the operations of training on one token of a sequence of `time` (default: seq_len) tokens."""
        return self.config.flops_per_token(time)

    def num_parameters(self) -> int:
        """Count the parameters, shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def takes_split_logits(self) -> bool:
        """Whether the loss copes with logits that are split by vocabulary."""
        return self.config.task == "mlm"

    def tensor_plan(self) -> dict[str, str]:
        """Return which module is split how under tensor parallelism, in the terms of `models.contract`."""
        if self.config.task in ("classify", "regress"):
            raise UsageError(
                "tensor_parallel splits texts, and a BERT for classes or numbers needs the first token of each alone",
                hint="Train it with strategy='ddp' or 'fsdp'.",
            )
        head = {"head": contract.HEAD_COLWISE}
        if self.config.task == "mlm":
            head = {"head.transform": contract.SEQUENCE, "head.norm": contract.SEQUENCE}
            head["head.output"] = contract.HEAD_COLWISE
        return {
            "embed.tokens": contract.EMBEDDING_ROWWISE,
            "embed.positions": contract.EMBEDDING_POSITIONS,
            "embed.segments": contract.EMBEDDING_ROWWISE,
            "embed.norm": contract.SEQUENCE,
            "layers.*.attention": contract.GATHER,
            "layers.*.attention.query": contract.COLWISE,
            "layers.*.attention.key": contract.COLWISE,
            "layers.*.attention.value": contract.COLWISE,
            "layers.*.attention.project": contract.ROWWISE,
            "layers.*.attention_norm": contract.SEQUENCE,
            "layers.*.feed": contract.GATHER,
            "layers.*.feed.expand": contract.COLWISE,
            "layers.*.feed.project": contract.ROWWISE,
            "layers.*.feed_norm": contract.SEQUENCE,
            **head,
        }

    def tensor_divides(self) -> dict[str, int]:
        """Return what the number of tensor-parallel ranks must divide."""
        return {"heads": self.config.heads, "ffn_hidden": self.config.ffn_hidden}

    def compile_regions(self) -> list[tuple[nn.Module, str]]:
        """Return what torch.compile compiles: the layers, once for all of them."""
        return [(layer, "forward") for layer in self.layers]


def bert(preset: str = "debug", **changes: Any) -> Bert:
    """Return a BERT of a preset's shape, with some of its `BertConfig` fields changed."""
    return Bert(from_preset("bert", PRESETS, preset, changes))
