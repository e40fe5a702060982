"""What strategies may use of a model: one Protocol per ability, and the words of a tensor-parallel plan.

A model implements the Protocols of the strategies it should support. No base class is needed: `implements` looks for
the names.

`tensor_plan()` maps module-name patterns ("*" stands for one part of a dotted name) to the words below, which a
strategy turns into shards. Between layers every rank holds its slice of the sequence (dim 1 of [batch, time, hidden]);
inside attention and feed-forward it holds the whole sequence and its slice of heads or features. `tensor_divides()`
returns what the number of tensor-parallel ranks must divide. Vocabulary and positions are not in it, because they may
be cut unevenly (GPT-2's 50257 tokens over 2 ranks). The sequence length must be a multiple too, but only a batch has
it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

P = TypeVar("P")


def implements(model: object, protocol: Callable[..., P]) -> TypeIs[P]:
    """Whether a model has the methods and attributes of a protocol, also where a wrapper passes them on."""
    methods = [name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"]
    attributes = getattr(protocol, "__annotations__", {})
    return all(callable(getattr(model, name, None)) for name in methods) and all(
        hasattr(model, name) for name in attributes
    )


class LossFromOutput(Protocol):
    """A model that computes its loss; a pipeline calls this on the last stage."""

    def loss_from_output(self, output: Any, target: Any) -> torch.Tensor:
        """Return the mean loss of a batch's output."""


class WeighsLoss(Protocol):
    """A model that returns its loss, or a `loss_fn`, whose mean is one over something else than samples or labels."""

    def loss_weight(self, target: Any) -> float | torch.Tensor:
        """Return how many units the loss of a batch is the mean of; a tensor stays on its device.

        `target`: what the loss is called with after the output; for a model, the whole batch.
        """


class InitialisesWeights(Protocol):
    """A model that may be built on the meta device."""

    def init_weights(self) -> None:
        """Draw all weights in place, once they have memory."""


class AdapterLayer(Protocol):
    """A module inside a model with weights that `init_weights` does not know, such as LoRA's."""

    def reset_adapter(self) -> None:
        """Draw the adapter's weights in place."""


class MultipliesIn8Bits(Protocol):
    """A layer whose own products may be in 8 bits, such as an output matrix that also computes the loss."""

    in_features: int
    fp8: bool


class WrapsModel(Protocol):
    """A module around a model with its own loss, such as DPO; a recipe names its class as the `loss`."""

    def begin(self) -> None:
        """Keep what the loss needs of the start weights: called when adapters are there, before ranks share them."""

    def trained_model(self) -> torch.nn.Module:
        """Return the model inside, which is exported."""


class TensorPlan(Protocol):
    """A model for tensor_parallel."""

    def tensor_plan(self) -> Mapping[str, Any]:
        """Return module-name patterns to words (`phalanx.model`) or torch ParallelStyles."""


class TensorDivides(Protocol):
    """A model that knows what the number of tensor-parallel ranks must divide."""

    def tensor_divides(self) -> Mapping[str, int]:
        """Return sizes, such as the number of heads, under names for the error message."""


class SplitLogits(Protocol):
    """A model that can compute its loss on logits that stay split by vocabulary."""

    takes_split_logits: bool


class PipelineUnits(Protocol):
    """A model for pipeline_parallel; its forward skips units that are None."""

    def pipeline_units(self) -> Sequence[str]:
        """Return the names of the modules that run one after the other and hold all parameters."""


class CompileRegions(Protocol):
    """A model that is compiled in parts: torch compiles equal parts once, and a deep model as fast as a flat one."""

    def compile_regions(self) -> Sequence[tuple[torch.nn.Module, str]]:
        """Return modules and the name of the method of each that is compiled; the rest runs as written."""


class ExampleInputs(Protocol):
    """A model whose units can be timed (pipeline_cuts = 'measured')."""

    def example_inputs(self) -> Sequence[torch.Tensor]:
        """Return arguments for forward."""


class SequenceShards(Protocol):
    """A model that must know into how many slices of the sequence tensor parallelism splits its hidden states."""

    sequence_shards: int


class RingReady(Protocol):
    """An attention module without parameters, (query, key, value) to the mix, that context_parallel may replace."""

    ring_ready: bool
    causal: bool


class ChecksLength(Protocol):
    """A model with a longest sequence; under context_parallel it only sees slices."""

    def check_length(self, time: int) -> None:
        """Raise for a whole sequence that is too long."""


class ExpertModules(Protocol):
    """A mixture of experts, for expert_parallel."""

    def expert_modules(self) -> list[str]:
        """Return the names of the modules whose parameters have one entry per expert in dim 0."""


class CountsFlops(Protocol):
    """A model of tokens whose use of the hardware (MFU) can be reported."""

    def flops_per_token(self, time: int | None = None) -> int:
        """Return the operations of training on one token of a sequence of `time` tokens."""


class HasHiddenSize(Protocol):
    """A model's `config`, as Hugging Face's have it: engines may choose buffer sizes by it."""

    hidden_size: int


class HasDimensions(Protocol):
    """A model's `config` that gives the sizes of a transformer in the planner's words (fields of `plan.ModelShape`)."""

    def dimensions(self) -> Mapping[str, Any]:
        """Return `layers`, `hidden`, `heads`, `vocab`, and what differs from the defaults of `plan.ModelShape`."""


def recorded_dimensions(model: object) -> dict[str, Any]:
    """Return what a run records of its model for the planner, as plain data; empty for a model without dimensions.

    Also of a model that was wrapped, split or sharded since: its config stays that of the whole. The config of a
    Hugging Face model is recorded as it is: the planner knows the families.
    """
    module = getattr(model, "module", model)
    config: Any = getattr(module, "config", None)
    name = type(module).__name__.removeprefix("FSDP")
    if implements(config, HasDimensions):
        return {"name": name, "dimensions": dict(config.dimensions())}
    if hasattr(config, "to_json_string") and hasattr(config, "model_type"):
        values = json.loads(config.to_json_string(use_diff=False))
        return {"name": name, "config": {**values, "model_type": config.model_type}}
    return {}


COLWISE = "colwise"
"""A linear layer, split by output features (dim 0 of weight and bias). Whole input in, this rank's features out."""

ROWWISE = "rowwise"
"""A linear layer, split by input features (dim 1 of the weight; whole bias). This rank's features in; the products are
summed over the ranks and scattered along the sequence."""

SEQUENCE = "sequence"
"""A norm: whole weights on every rank, applied to this rank's slice of the sequence. Its gradients must be summed over
the ranks."""

GATHER = "gather"
"""A module with several column-wise layers: its first input is gathered along the sequence once, before it runs."""

EMBEDDING_ROWWISE = "embedding-rowwise"
"""A token embedding, split by vocabulary (dim 0). Whole token ids in; the vectors are summed over the ranks and
scattered along the sequence (dim 1)."""

EMBEDDING_POSITIONS = "embedding-positions"
"""A position embedding, split by position (dim 0). Whole positions [time] in, this rank's slice [time, hidden] (dim 0)
out."""

HEAD_COLWISE = "head-colwise"
"""The output layer, split by vocabulary (dim 0). Its input is gathered along the sequence; the logits may stay split
for a parallel loss. With tied weights it shares the shards of the token embedding."""

WHOLE = "whole"
"""A module that every rank keeps whole, and feeds with the same whole inputs."""
