"""What strategies may use of a model: one Protocol per ability. A model implements those it wants to gain.

No base class is needed: `implements` looks for the names. The reference models implement all that suit them.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


class InitialisesWeights(Protocol):
    """A model that may be built on the meta device."""

    def init_weights(self) -> None:
        """Draw all weights in place, once they have memory."""


class Adapter(Protocol):
    """A module inside a model with weights that `init_weights` does not know, such as LoRA's."""

    def reset_adapter(self) -> None:
        """Draw the adapter's weights in place."""


class TensorPlan(Protocol):
    """A model for tensor_parallel."""

    def tensor_plan(self) -> Mapping[str, Any]:
        """Return module-name patterns to words (`phalanx.models.plan_names`) or torch ParallelStyles."""


class TensorDivides(Protocol):
    """A model that knows what the number of tensor-parallel ranks must divide."""

    def tensor_divides(self) -> Mapping[str, int]:
        """Return sizes, such as the number of heads, under names for the error message."""


class SplitLogits(Protocol):
    """A model that can compute its loss on logits that stay split by vocabulary (loss_parallel)."""

    takes_split_logits: bool


class PipelineUnits(Protocol):
    """A model for pipeline_parallel; its forward skips units that are None."""

    def pipeline_units(self) -> Sequence[str]:
        """Return the names of the modules that run one after the other and hold all parameters."""


class ExampleInputs(Protocol):
    """A model whose units can be timed (pipeline_balance = 'measured')."""

    def example_inputs(self) -> Sequence[torch.Tensor]:
        """Return what forward takes."""


class SequenceShards(Protocol):
    """A pipeline stage that must know how many slices of the sequence its hidden states are split into."""

    sequence_shards: int


class RingReady(Protocol):
    """An attention module without parameters, (query, key, value) to the mix, that context_parallel may replace."""

    ring_ready: bool
    causal: bool


class ChecksLength(Protocol):
    """A model with a longest sequence; under context_parallel it only sees slices."""

    def check_length(self, time: int) -> None:
        """Refuse a whole sequence that is too long."""


class ExpertModules(Protocol):
    """A mixture of experts, for expert_parallel."""

    def expert_modules(self) -> list[str]:
        """Return the names of the modules whose parameters have one entry per expert in dim 0."""


class CountsFlops(Protocol):
    """A model of tokens whose use of the hardware (MFU) can be reported."""

    def flops_per_token(self, time: int | None = None) -> int:
        """Return the operations of training on one token of a sequence of `time` tokens."""


class HasHiddenSize(Protocol):
    """A model's `config`, as Hugging Face's have it: DeepSpeed's "auto" buffer sizes follow from it."""

    hidden_size: int
