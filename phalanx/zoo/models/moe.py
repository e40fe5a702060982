"""A mixture-of-experts decoder: routing, dispatch to experts, and the balance loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import ModelError
from phalanx.zoo.models.attention import DocumentMask, rotary_table
from phalanx.zoo.models.decoder import Decoder
from phalanx.zoo.models.init import from_preset
from phalanx.zoo.models.llama import Attention, LlamaConfig
from phalanx.zoo.models.loss import LMOutput


class DispatchedTokens(NamedTuple):
    """Copies of tokens, sorted by expert."""

    rows: Tensor
    """[tokens x top_k, hidden]: the rows of expert 0 first."""

    counts: Tensor
    """[experts]: how many rows each expert has; int64."""

    order: Tensor
    """[tokens x top_k]: row r is choice order[r] % top_k of token order[r] // top_k."""


def dispatch(tokens: Tensor, experts: Tensor, num_experts: int) -> DispatchedTokens:
    """Sort a copy of each token [tokens, hidden] for each of its experts [tokens, top_k].

    Rows for one expert, and so for one rank's experts, lie together: `rows` and `counts` are what an all-to-all sends.
    """
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))
    return DispatchedTokens(tokens[order // experts.shape[1]], counts, order)


def combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the experts' rows in the tokens' order and add each token's [tokens, top_k] weighted rows."""
    tokens, top_k = weights.shape
    restored = torch.empty_like(rows).index_copy(0, order, rows)
    return (restored.view(tokens, top_k, -1) * weights.to(rows.dtype).unsqueeze(-1)).sum(dim=1)


def balance_loss(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Return experts x sum(share of choices x mean probability) per sequence: [batch].

    From [batch, time, experts] and [batch, time, top_k]. It is 1 when all experts are used alike and grows with the
    imbalance. Taken of the whole batch, it would depend on how the batch is split over ranks.
    """
    chosen = experts.flatten(1)
    choice = probabilities.new_full((), 1 / chosen.shape[1]).expand(chosen.shape)
    shares = torch.zeros_like(probabilities[:, 0]).scatter_add(1, chosen, choice)
    return probabilities.shape[-1] * (shares * probabilities.mean(dim=1)).sum(dim=-1)


def mean_over_labels(values: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of one value per sequence, each weighed by the labels of its sequence that count.

    The cross entropy is a mean over labels, and micro-batches are weighed by theirs: so is what is added to it, or a
    step would depend on the split. Zero if no label counts.
    """
    labels = (targets != IGNORED_LABEL).sum(dim=1)
    return (values * labels).sum() / labels.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig(LlamaConfig):
    """A Llama with `experts` feed-forward nets of `ffn_hidden` per layer, `top_k` of them for each token."""

    experts: int = 4
    top_k: int = 2
    balance: float = 0.01
    """How much of the balance loss is added to the loss in training."""

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)
        if not 1 <= self.top_k <= self.experts:
            raise ModelError(
                f"top_k={self.top_k} of experts={self.experts} cannot be chosen. Allowed: 1..{self.experts}."
            )

    def dimensions(self) -> dict[str, Any]:
        """Return the sizes by which `phalanx plan` knows it."""
        return {**LlamaConfig.dimensions(self), "experts": self.experts, "active_experts": self.top_k}

    def layer_weights(self) -> int:
        """Return attention + router + top_k x 3 hidden x ffn_hidden."""
        experts = self.top_k * 3 * self.hidden * self.ffn_hidden
        return self.attention_weights() + self.experts * self.hidden + experts

    def num_parameters(self) -> int:
        """Return Llama's count with all experts, not only `top_k`."""
        idle = (self.experts - self.top_k) * 3 * self.hidden * self.ffn_hidden
        return LlamaConfig.num_parameters(self) + self.layers * idle


PRESETS = {
    "debug": MoEConfig(layers=2, ffn_hidden=64),
    "small": MoEConfig(seq_len=256, layers=6, heads=6, kv_heads=2, hidden=384, ffn_hidden=512, experts=8),
    "8x7b": MoEConfig(
        vocab_size=32_000,
        seq_len=32_768,
        layers=32,
        heads=32,
        kv_heads=8,
        hidden=4096,
        ffn_hidden=14_336,
        rope_theta=1_000_000.0,
        experts=8,
        balance=0.02,
    ),
}
"""About 0.1 and 32 million parameters, then the shape of Mixtral 8x7B."""


class Routing(NamedTuple):
    """The choice of a router."""

    experts: Tensor
    """[batch, time, top_k]"""

    weights: Tensor
    """[batch, time, top_k], adding up to 1"""

    balance: Tensor
    """The balance loss of each sequence, [batch]."""


class Router(nn.Module):
    """Chooses the `top_k` most likely experts for each token."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.score = nn.Linear(config.hidden, config.experts, bias=False)

    def forward(self, inputs: Tensor) -> Routing:
        """Route [batch, time, hidden]."""
        scores = self.score(inputs)
        # In half precision close experts would tie, and the choice would depend on the order of additions.
        probabilities = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        return Routing(experts, weights / weights.sum(dim=-1, keepdim=True), balance_loss(probabilities, experts))


class Experts(nn.Module):
    """All SwiGLU nets of a layer, stacked [experts, in, out]: sharded on dim 0, a rank has some of the experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        shape = (config.experts, config.hidden, config.ffn_hidden)
        self.gate = nn.Parameter(torch.empty(shape))
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(config.experts, config.ffn_hidden, config.hidden))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows, which lie together: `counts` [experts] says how many they are.

        Under expert parallelism the rows of all ranks for this rank's experts come here.
        """
        parts = rows.split(counts.tolist())  # type: ignore[no-untyped-call]
        outputs = [
            (F.silu(part @ gate) * (part @ up)) @ down
            for part, gate, up, down in zip(parts, self.gate, self.up, self.down, strict=True)
        ]
        return torch.cat(outputs)

    def dense(self, inputs: Tensor, routed: Routing) -> Tensor:
        """Return the weighted outputs of [batch, time, hidden] from every expert for every token.

        For export: a graph without Python cannot give each expert as many rows as the tokens ask for.
        """
        shares = inputs.new_zeros(*inputs.shape[:2], self.gate.shape[0])
        shares = shares.scatter(-1, routed.experts, routed.weights.to(inputs.dtype))
        gate = torch.einsum("bth,ehf->btef", inputs, self.gate)
        up = torch.einsum("bth,ehf->btef", inputs, self.up)
        outputs = torch.einsum("btef,efh->bteh", F.silu(gate) * up, self.down)
        return (outputs * shares[..., None]).sum(dim=2)


class MoEFeed(nn.Module):
    """Routes and dispatches tokens to the experts, and combines their outputs."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return [batch, time, hidden] refined, and the balance loss."""
        routed: Routing = self.router(inputs)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[no-untyped-call]
            return self.experts.dense(inputs, routed), routed.balance
        sent = dispatch(inputs.flatten(0, 1), routed.experts.flatten(0, 1), self.num_experts)
        rows = self.experts(sent.rows, sent.counts)
        return combine(rows, sent.order, routed.weights.flatten(0, 1)).view_as(inputs), routed.balance


class Block(nn.Module):
    """One layer: attention and experts, each with its norm before and its residual around."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.feed = MoEFeed(config)

    def forward(self, hidden: Tensor, table: Tensor, mask: DocumentMask | None = None) -> tuple[Tensor, Tensor]:
        """Refine [batch, time, hidden], and return it with the balance loss."""
        hidden = hidden + self.attention(self.attention_norm(hidden), table, mask)
        refined, balance = self.feed(self.feed_norm(hidden))
        return hidden + refined, balance


class MoE(Decoder):
    """Token embeddings, a stack of blocks with experts, and a score for every token of the vocabulary."""

    config: MoEConfig

    def __init__(self, config: MoEConfig) -> None:
        embed = nn.Embedding(config.vocab_size, config.hidden)
        layers = [Block(config) for _ in range(config.layers)]
        super().__init__(config, embed, layers, nn.RMSNorm(config.hidden, eps=config.norm_eps))

    def init_weights(self) -> None:
        """Draw the weights again, those of the experts like the others."""
        super().init_weights()
        for module in self.modules():
            if isinstance(module, Experts):
                nn.init.normal_(module.gate, std=0.02)
                nn.init.normal_(module.up, std=0.02)
                nn.init.normal_(module.down, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor | LMOutput:
        """Return the logits [batch, time, vocab_size]; with targets (-100: ignored) the mean cross-entropy as well.

        In training the layers' mean balance loss, times `config.balance`, is part of the loss: a mean over sequences,
        each weighed by its labels. Tokens do not see those
        of other `documents` [batch, time], and positions restart in each.
        """
        config = self.config
        positions, mask = self.packed(tokens, positions, documents)
        table = rotary_table(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        if self.embed is None:
            raise ModelError(
                "a mixture of experts cannot be a pipeline stage: its balance loss is collected from all layers."
            )
        hidden = self.stream(self.embed(tokens))
        balances = []
        for layer in self.layers:
            hidden, balance = layer(hidden, table, mask)
            balances.append(balance)
        output = self.finish(hidden, targets)
        if self.training and isinstance(output, LMOutput):
            assert targets is not None, "the output has a loss"
            balanced = mean_over_labels(torch.stack(balances).mean(dim=0), targets)
            return LMOutput(output.loss + config.balance * balanced, output.logits)
        return output

    def pipeline_units(self) -> list[str]:
        """Raise: the balance loss is collected from all layers."""
        raise ModelError(
            "a mixture of experts cannot be cut into pipeline stages: its balance loss is collected from all layers",
            hint="Use expert_parallel, or strategy='fsdp'.",
        )

    def compile_regions(self) -> list[tuple[nn.Module, str]]:
        """Return the attention of each layer: what experts compute has another shape in each step."""
        return [(layer.get_submodule("attention"), "forward") for layer in self.layers if layer is not None]

    def expert_modules(self) -> list[str]:
        """Return the modules whose experts may lie on different ranks."""
        return [f"layers.{number}.feed.experts" for number in range(len(self.layers))]

    def num_parameters(self, *, embeddings: bool = True, active: bool = False) -> int:
        """Count the parameters; `active`: of the experts only the `top_k` that a token uses."""
        total = super().num_parameters(embeddings=embeddings)
        idle = self.config.experts - self.config.top_k
        return total - active * self.config.layers * idle * 3 * self.config.hidden * self.config.ffn_hidden


def moe(preset: str = "debug", **changes: Any) -> MoE:
    """Return a mixture of experts of a preset's shape, with some of its `MoEConfig` fields changed."""
    return MoE(from_preset("moe", PRESETS, preset, changes))
