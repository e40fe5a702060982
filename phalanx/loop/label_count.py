"""What the loss of a batch is the mean of: its samples, its labels that count, or what the loss itself says.

Micro-batches of one step, and batches of an evaluation, are averaged with these weights, so that the gradient and the
reported loss are those of all samples together, whatever the split. What a loss averages is a fact of its type, never
of the values in some batch: a first batch without ignored labels says nothing about the second.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx import torch_compat
from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import ModelError
from phalanx.loop.metrics import LossFn
from phalanx.model import WeighsLoss, implements

_OF_LABELS = (nn.CrossEntropyLoss, nn.NLLLoss)
_CAUSAL = re.compile("CausalLM|LMHead")
"""In the names of transformers' classes that compare each output with the next label."""


@dataclass(frozen=True)
class LabelCount:
    """How the labels of a batch count in its loss."""

    ignored: int = IGNORED_LABEL
    """The label that has no part in the loss."""
    class_weights: torch.Tensor | None = None
    """How much a label of each class counts; None: all alike."""
    skipped: int = 0
    """How many labels at the beginning of each sequence have no part in the loss."""
    over_samples: bool = False
    """Whether the loss is a mean over samples, although these have labels."""
    weight_of: Callable[[Any], float | torch.Tensor] | None = None
    """The method `loss_weight` of a loss or model that says its weight itself."""
    of_batch: bool = False
    """Whether `weight_of` takes the whole batch: a model's; a loss's takes what the loss is called with."""

    def applies_to(self, target: Any) -> bool:
        """Whether the loss of a batch with this target is weighed by `count`, rather than by samples."""
        if self.weight_of is not None:
            return True
        labels = target.get("labels") if isinstance(target, Mapping) else target
        if not isinstance(labels, torch.Tensor) or self.over_samples:
            return False
        return not labels.is_floating_point() and not labels.is_complex() and labels.dtype is not torch.bool

    def count(self, target: Any) -> float | torch.Tensor:
        """Return how many units the loss is the mean of: labels that count, by the weights of their classes.

        On a GPU the result stays there, in float64: shares of it must not be rounded to single precision.
        """
        if self.weight_of is not None:
            return _on_its_device(torch.as_tensor(self.weight_of(target)))
        labels = target.get("labels") if isinstance(target, Mapping) else target
        if not isinstance(labels, torch.Tensor):
            raise ModelError(
                "loss_weighting = 'tokens' needs a tensor of labels in the batch",
                hint="Give batches as (inputs, labels) or as a dict with 'labels'.",
            )
        labels = labels[:, self.skipped :] if self.skipped else labels
        counts = labels != self.ignored
        if self.class_weights is None:
            return _on_its_device(counts.count_nonzero())
        weights = self.class_weights.to(labels.device).double()
        return _on_its_device((weights[labels.where(counts, 0)] * counts).sum())


def _on_its_device(count: torch.Tensor) -> float | torch.Tensor:
    """Return a count in float64; on the host as a number, with which a step computes several times faster."""
    return float(count) if count.device.type == "cpu" else count.double()


def counted_by(model: nn.Module, loss_fn: LossFn | None) -> LabelCount:
    """Return how a loss, or else the loss that the model returns, counts labels."""
    speaker: Any = model if loss_fn is None else loss_fn
    if implements(speaker, WeighsLoss):
        return LabelCount(weight_of=speaker.loss_weight, of_batch=loss_fn is None)
    if loss_fn is None:
        return _counted_by_model(model)
    if isinstance(loss_fn, nn.CTCLoss):
        return LabelCount(over_samples=True)
    if isinstance(loss_fn, _OF_LABELS):
        return LabelCount(loss_fn.ignore_index, loss_fn.weight)
    keywords = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    return LabelCount(keywords.get("ignore_index", IGNORED_LABEL), keywords.get("weight"))


def _counted_by_model(model: nn.Module) -> LabelCount:
    """Look at the model inside torch.compile's and peft's wrappers: transformers' classes differ in their losses."""
    base: Any = torch_compat.uncompiled(model)
    if callable(getattr(base, "get_base_model", None)):
        base = torch_compat.uncompiled(base.get_base_model())
    name, config = type(base).__name__, getattr(base, "config", None)
    if not hasattr(base, "loss_type"):
        return LabelCount()
    if "CTC" in name or base.loss_type == "ForCTC":
        return LabelCount(over_samples=True)
    if "SemanticSegmentation" in name:
        return LabelCount(getattr(config, "semantic_loss_ignore_index", IGNORED_LABEL))
    # The loss of generation from images is that of a causal model; encoder-decoders write labels unshifted.
    causal = _CAUSAL.search(name) is not None or base.loss_type == "ForConditionalGeneration"
    return LabelCount(skipped=int(causal and not getattr(config, "is_encoder_decoder", False)))
