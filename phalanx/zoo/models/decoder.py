"""What the decoders share: config, parts that a pipeline stage may lack, counts, and sampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from phalanx.world.splits import too_long
from phalanx.zoo.models.attention import DocumentMask, document_mask, positions_in
from phalanx.zoo.models.generation import Sampling, generate
from phalanx.zoo.models.init import init_transformer, is_meta
from phalanx.zoo.models.loss import LMHead, LMOutput, scored, token_loss

_LEAST_HEAD = 16
"""The narrowest head that FlexAttention has kernels for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig(ABC):
    """The shape of a decoder."""

    vocab_size: int = 256
    seq_len: int = 64
    layers: int = 2
    heads: int = 4
    hidden: int = 64
    norm_eps: float = 1e-5
    tie_weights: bool = True

    @abstractmethod
    def layer_weights(self) -> int:
        """Return the weights of one layer's matrices that multiply each token."""

    def dimensions(self) -> dict[str, Any]:
        """Return the sizes by which `phalanx plan` knows a transformer (see `model.py`)."""
        sizes = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads}
        return {**sizes, "vocab": self.vocab_size, "tied_embeddings": self.tie_weights, "reference": True}

    def flops_per_token(self, time: int | None = None) -> int:
        """Return 6 for each weight that multiplies a token, plus 12 x hidden x time per layer for attention.

        Forward and backward; the causal half of attention that need not be computed is counted, as is usual.
        """
        matrices = self.layers * self.layer_weights() + self.vocab_size * self.hidden
        return 6 * matrices + 12 * self.layers * self.hidden * (time or self.seq_len)


class Decoder(nn.Module):
    """A decoder-only language model: `embed`, `layers`, `norm`, `head`.

    A pipeline stage sets what it lacks to None, entries of `layers` too, so that names of parameters stay as they are
    in the whole model. Without `embed` the model takes hidden states [batch, time, hidden]; without `head` it returns
    them.
    """

    embed: nn.Module | None
    layers: nn.ModuleList
    norm: nn.Module | None
    head: nn.Linear | None
    config: DecoderConfig
    takes_split_logits: ClassVar[bool] = True
    """Whether `head` may give logits that are split by vocabulary (DTensors): `finish` copes with them."""

    residual: ClassVar[tuple[str, ...]] = ("project",)
    """Last parts of the names of matrices whose outputs are added to the residual stream."""

    def __init__(self, config: DecoderConfig, embed: nn.Module, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.sequence_shards = 1
        """Into how many slices of the sequence the hidden states between layers are split (sequence parallelism)."""
        self.embed = embed
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head = LMHead(config.hidden, config.vocab_size, bias=False)
        self.tie()
        if not is_meta(self):
            self.init_weights()

    def init_weights(self) -> None:
        """Draw the weights again, also after a start on the meta device: N(0, 0.02), residual outputs narrower."""
        self.tie()
        init_transformer(self, layers=self.config.layers, residual=self.residual)

    def positions(self, inputs: Tensor) -> Tensor:
        """Return 0, 1, ... for a whole sequence of tokens, or of hidden states without an embedding."""
        time = inputs.shape[1] * (1 if self.embed is not None else self.sequence_shards)
        self.check_length(time)
        return torch.arange(time, device=inputs.device)

    def packed(
        self, inputs: Tensor, positions: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, DocumentMask | None]:
        """Return the positions of tokens or hidden states, and the mask that keeps documents apart, if there are any.

        Blocks of keys are for training on a GPU, where the layers are compiled: evaluation runs them as written.
        """
        if documents is None:
            return self.positions(inputs) if positions is None else positions, None
        compiled = any(name in vars(module) for module, name in self.compile_regions()[:1])
        wide = self.config.hidden // self.config.heads >= _LEAST_HEAD
        mask = document_mask(documents, in_blocks=compiled and wide and documents.is_cuda and self.training)
        return positions_in(documents) if positions is None else positions, mask

    def check_length(self, time: int) -> None:
        """Raise for sequences that are too long; a caller that gives `positions` of slices checks the whole length."""
        if (wrong := too_long(time, self.config.seq_len)) is not None:
            raise wrong

    @staticmethod
    def stream(embedded: Tensor) -> Tensor:
        """Return embeddings in the type of the residual stream: bf16 under autocast to bf16, half the traffic of fp32.

        fp16 has too small a range for sums over layers.
        """
        device = embedded.device.type
        half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
        return embedded.to(torch.bfloat16) if half else embedded

    def finish(self, hidden: Tensor, targets: Tensor | None) -> Tensor | LMOutput:
        """Turn the last hidden states into logits, and with targets into a loss, as far as this stage has the parts."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.head is None:
            return hidden
        return scored(self.head, hidden, targets, trains=self.training, is_split=self.sequence_shards > 1)

    def loss_from_output(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy; targets of -100 do not count."""
        return token_loss(output, target)

    def compile_regions(self) -> list[tuple[nn.Module, str]]:
        """Return what torch.compile compiles: the layers. The head has its own kernels."""
        return [(layer, "forward") for layer in self.layers if layer is not None]

    def pipeline_units(self) -> list[str]:
        """Return the modules that run one after the other: any run of them is a pipeline stage."""
        return ["embed", *(f"layers.{number}" for number in range(len(self.layers))), "norm", "head"]

    def example_inputs(self) -> tuple[Tensor]:
        """Return a sequence of the maximum length, to measure the cost of each unit."""
        return (torch.zeros(1, self.config.seq_len, dtype=torch.long),)

    def token_embedding(self) -> nn.Embedding | None:
        """Return the embedding whose matrix the head shares when weights are tied."""
        return self.embed if isinstance(self.embed, nn.Embedding) else None

    def tie(self) -> None:
        """Make the head use the token embedding's matrix, where the config wants it and both are here.

        `init_weights` calls this too, because `Module.to_empty` separates the two.
        """
        embedding = self.token_embedding()
        if self.config.tie_weights and self.head is not None and embedding is not None:
            self.head.weight = embedding.weight

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Count the parameters that are here, shared ones once; without embeddings, those that multiply every token."""
        total = sum(parameter.numel() for parameter in self.parameters())
        if embeddings or self.embed is None:
            return total
        total -= sum(parameter.numel() for parameter in self.embed.parameters())
        if self.config.tie_weights and self.head is not None:
            total += self.head.weight.numel()  # a tied embedding is the output matrix as well, and does multiply
        return total

    def flops_per_token(self, time: int | None = None) -> int:
        """Return the operations of training on one token of a sequence of `time` (default: seq_len) tokens."""
        return self.config.flops_per_token(time)

    def generate(
        self,
        tokens: Tensor | Sequence[Sequence[int]],
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        end_tokens: Sequence[int] = (),
        generator: torch.Generator | None = None,
        multiple: int = 1,
        through: Callable[..., Any] | None = None,
        cached: bool = True,
    ) -> Any:
        """Continue a tensor [batch, time], or a list of prompts of any lengths, by `count` tokens; return its like.

        Temperature 0 takes the most likely token each time. Generation ends early when all rows have drawn one of
        `end_tokens`: a list ends with it, a row of a tensor repeats it. Keys and values of earlier tokens are kept
        until a text is longer than `seq_len`: from there on, and with `cached=False`, each token is computed from the
        last `seq_len` tokens. Ranks that share a sequence can only cut one whose length is a `multiple` of their
        number. `through` is called instead of the model itself where that has only some of its layers.
        """
        rows = generate(
            self,
            tokens,
            count,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            end_tokens=end_tokens,
            generator=generator,
            multiple=multiple,
            through=through,
            cached=cached,
        )
        return rows.tokens[:, : rows.longest] if isinstance(tokens, Tensor) else rows.lists()
