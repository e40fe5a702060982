"""From a batch to a loss, for every calling convention: decided once on the first batch, then one call per step.

The conventions: a `loss_fn(output, target)`; a model that returns its loss (a scalar, `.loss`, `["loss"]`, the one
scalar of a tuple), called with a dict (Hugging Face style) or with (inputs, targets); a plain model whose outputs and
targets imply the usual loss.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F

from phalanx import torch_compat
from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import ModelError, PhalanxError, a_type, first_line
from phalanx.loop.label_count import LabelCount, counted_by
from phalanx.loop.metrics import LossFn, cross_entropy, refuse_broadcast
from phalanx.model import LossFromOutput, implements
from phalanx.strategies.tensors import count_rows

if TYPE_CHECKING:
    from phalanx.loop.gradients import Gradients
    from phalanx.loop.precision import Precision
    from phalanx.observe.step_clock import StepClock

_TARGET_NAMES = {"label", "labels", "target", "targets", "y"}


@dataclass(frozen=True)
class Forward:
    """How this model is called. `output` is what metrics see, `target` what they compare it with."""

    run: Callable[[nn.Module, Any], tuple[torch.Tensor | None, Any]]
    target: Callable[[Any], Any]
    note: str = ""
    loss_fn: LossFn | None = None
    """The loss of (output, target), where it can be computed without calling the model."""
    may_shift: bool = False
    """Whether only the model knows which output belongs to which target: a causal language model may shift them."""

    counting: LabelCount = field(default_factory=lambda: LabelCount())
    """How many units the loss of a batch is the mean of."""

    def is_mean_over_labels(self, batch: Any) -> bool:
        """Whether the loss of a batch is the mean over the labels that count, rather than over samples.

        The types of loss and target tell, not values, so that the answer is that of every batch on every rank.
        """
        return self.counting.applies_to(self.target(batch))

    def units(self, batch: Any) -> float | torch.Tensor:
        """Return how many units the loss of a batch is the mean of, if it is not one over samples."""
        whole = self.counting.of_batch or (self.counting.weight_of is not None and isinstance(batch, Mapping))
        return self.counting.count(batch if whole else self.target(batch))

    def share(self, batch: Any, samples: int, *, by_labels: bool) -> float | torch.Tensor:
        """Return the weight of a batch's loss in a mean over batches; a tensor stays on the device.

        The labels that count, or its samples. A batch in which no label counts has no loss: its weight is 0.
        """
        if not samples:
            return 0.0
        if by_labels:
            return self.units(batch)
        if self.counting.weight_of is not None or not self.is_mean_over_labels(batch):
            return float(samples)
        units = self.units(batch)
        return (units > 0).double() * samples if isinstance(units, torch.Tensor) else float(samples * (units > 0))

    def call(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor | None, Any]:
        """Return loss and output of a batch; a batch of the wrong shape is named with what it does not fit."""
        try:  # not the context manager, which costs more: this is called in every step
            return self.run(model, batch)
        except (RuntimeError, ValueError, IndexError) as error:
            raise_explained(error, model, batch)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the batch's mean loss."""
        loss, _ = self.call(model, batch)
        if isinstance(loss, torch.Tensor) and loss.ndim == 0:
            return loss
        if isinstance(loss, torch.Tensor):
            raise ModelError(
                f"the loss is a tensor of shape {list(loss.shape)}, not one number",
                hint="Return the mean over the batch: reduction='mean' in torch's losses.",
            )
        alone = isinstance(batch, torch.Tensor)  # [X, y] is a list of two batches
        raise ModelError(
            "no loss was found in what the model returned" if loss is None else f"the loss is {a_type(loss)}",
            hint="Give loss_fn=lambda output, target: ... that returns a scalar, or let the model return its loss."
            + f"\n  A batch is {shape_text(batch)} without a target: give TensorDataset(inputs, targets)." * alone,
        )


class BatchPasses:
    """The passes of one batch, as `Strategy.train_batch` calls them."""

    def __init__(
        self,
        gradients: Gradients,
        precision: Precision,
        forward: Forward,
        clock: StepClock,
        weight: float | torch.Tensor | None = None,
        *,
        by_labels: bool,
    ) -> None:
        """`weight`: how many units the batch's loss is the mean of; `by_labels`: whether its parts count by labels."""
        self._by_labels = by_labels
        self._gradients = gradients
        self._clock = clock
        self._forward = forward
        self._weight = weight
        self.autocast = precision.autocast
        self.loss_fn = forward.loss_fn
        self.target = forward.target

    def forward(self, wrapped: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the batch's mean loss."""
        self._gradients.announce(self._weight)
        with self.autocast():
            return self._forward.loss(wrapped, batch)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of that loss."""
        self._clock.enter("backward")
        self._gradients.backward(loss, self._weight)

    def begin(self) -> float | torch.Tensor:
        """Begin a backward pass that the strategy runs itself; return the factor on its loss."""
        self._clock.enter("backward")
        return self._gradients.enter(self._weight)

    def end(self) -> None:
        """End that backward pass."""
        self._gradients.leave()

    def weigh(self, batch: Any) -> float | torch.Tensor:
        """Return the weight of a part of the batch: its labels that count, or its samples."""
        return self._forward.units(batch) if self._by_labels else float(count_rows(self.target(batch)))


def decide_forward(model: nn.Module, loss_fn: LossFn | None, batch: Any) -> Forward:
    """Look at the model, the loss function and one batch, and return how to get from batch to loss."""
    counting = counted_by(model, loss_fn)
    loss_fn = refuse_broadcast(loss_fn)
    if isinstance(batch, Mapping):
        run = partial(_from_mapping, loss_fn=loss_fn)
        return Forward(run, _labels, may_shift=loss_fn is None, counting=counting)
    if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)) or len(batch) < 2:
        return Forward(partial(_self_target, loss_fn=loss_fn), _whole, counting=counting)
    if loss_fn is not None:
        return Forward(partial(_with_loss, loss_fn=loss_fn), itemgetter(-1), loss_fn=loss_fn, counting=counting)
    if _takes_targets(model, len(batch)):
        model_loss = model.loss_from_output if implements(model, LossFromOutput) else None
        return Forward(
            _with_targets, itemgetter(-1), loss_fn=model_loss, may_shift=model_loss is None, counting=counting
        )
    note = "no loss_fn given: the loss follows the targets (labels: cross entropy, numbers: MSE)"
    return Forward(_with_implied_loss, itemgetter(-1), note, loss_fn=implied_loss, counting=counting)


def _from_mapping(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> tuple[torch.Tensor | None, Any]:
    output = model(**batch)
    return _loss_and_output(output, **batch) if loss_fn is None else (loss_fn(output, batch), output)


def _self_target(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> tuple[torch.Tensor | None, Any]:
    inputs = batch[0] if isinstance(batch, Sequence) and len(batch) == 1 else batch
    output = model(inputs)
    return _loss_and_output(output, inputs) if loss_fn is None else (loss_fn(output, inputs), output)


def _with_loss(model: nn.Module, batch: Any, loss_fn: LossFn) -> tuple[torch.Tensor, Any]:
    output = model(*batch[:-1])
    return loss_fn(output, batch[-1]), output


def _with_targets(model: nn.Module, batch: Any) -> tuple[torch.Tensor | None, Any]:
    return _loss_and_output(model(*batch), *batch)


def _with_implied_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor | None, Any]:
    output = model(*batch[:-1])
    # A scalar next to scores is not the loss: without targets it is rather a penalty.
    loss, value = _find_loss(output) if _is_scalar(_first(output)) else (None, output)
    return (loss, value) if loss is not None else (implied_loss(output, batch[-1]), output)


def implied_loss(output: Any, target: Any) -> torch.Tensor:
    """Return the usual loss for these outputs and targets; an error where none is obvious."""
    if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor):
        if not target.is_floating_point() and output.ndim == target.ndim + 1:
            return cross_entropy(output, target)
        if target.is_floating_point() and output.shape in (target.shape, (*target.shape, 1)):
            return F.mse_loss(output.view_as(target), target)
    raise ModelError(
        "no loss_fn was given, and none is obvious for "
        f"an output {shape_text(output)} and a target {shape_text(target)}",
        hint="Give loss_fn=lambda output, target: ..., or let the model return its loss.",
    )


def _loss_and_output(result: Any, *inputs: Any, **named: Any) -> tuple[torch.Tensor | None, Any]:
    """Find the loss in what a model returned; `given` and `named` are its arguments."""
    loss, output = _find_loss(result)
    if loss is None and not isinstance(result, torch.Tensor) and not hasattr(result, "logits"):
        arguments = [shape_text(value) for value in inputs] + [
            f"{name}={shape_text(value)}" for name, value in named.items()
        ]
        raise ModelError(
            f"no loss was found in what the model returned: {shape_text(result)}. "
            f"It was called as model({', '.join(arguments)})",
            hint="Return the loss as a scalar tensor, as .loss, as a dict's 'loss' or as the one scalar of a tuple, or "
            "give loss_fn: then the model is called with the inputs alone.",
        )
    return loss, output


def _find_loss(result: Any) -> tuple[torch.Tensor | None, Any]:
    """Return (loss, what metrics should see); the loss is None when the result holds none."""
    loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
    if loss is None and isinstance(result, Mapping):
        loss = result.get("loss")
    if loss is None and isinstance(result, tuple):
        scalars = [value for value in result if _is_scalar(value)]
        if len(scalars) == 1:
            return scalars[0], next((value for value in result if value is not scalars[0]), None)
    if not _is_scalar(loss):
        return None, result
    logits = getattr(result, "logits", None)
    if logits is None and isinstance(result, Mapping):
        logits = result.get("logits")
    return loss, logits


def _takes_targets(model: nn.Module, items: int) -> bool:
    """Whether forward wants the batch's last item too: it cannot be called without, or names it as a target.

    An optional argument of another name, such as a mask, is not for targets.
    """
    positional = positional_parameters(model)
    if len(positional) < items:
        return False
    last = positional[items - 1]
    return last.default is last.empty or last.name.lower() in _TARGET_NAMES


def positional_parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Return the arguments that the model's forward takes by position."""
    try:
        parameters = inspect.signature(torch_compat.uncompiled(model).forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _first(result: Any) -> Any:
    """Return what may be the loss of a model that was called without targets: itself, `.loss`, `["loss"]`, or first."""
    if isinstance(result, tuple) and not hasattr(result, "loss"):
        return result[0] if result else None
    return result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)


def _labels(batch: Any) -> Any:
    return batch.get("labels", batch.get("targets"))


def _whole(batch: Any) -> Any:
    return batch


_ABOUT_SHAPES = re.compile(
    r"shapes? cannot be multiplied|size mismatch|must match the size|expected input.*to have|batch_size|"
    r"Given groups|normalized_shape|same size|shape .* is invalid|dimension out of range|must have (the )?same dtype|"
    r"expected scalar type|Expected .*dtype|should be the same|must be equal|index out of range in self|"
    r"Expected more than 1 value per channel",
    re.IGNORECASE,
)


def shape_text(value: Any) -> str:
    """Return the type and shape of a tensor, or of what a tuple, list or dict holds."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (tuple, list)) and len(value) < 9:
        return f"{type(value).__name__} of ({', '.join(shape_text(item) for item in value)})"
    if isinstance(value, Mapping) and len(value) < 9:
        inside = ", ".join(f"{name}: {shape_text(item)}" for name, item in value.items())
        return f"{type(value).__name__} of ({inside})"
    return "None" if value is None else type(value).__name__


_ABOUT_VIEWS = re.compile(r"view size is not compatible|Cannot view a tensor", re.IGNORECASE)
"""torch's messages about `x.view(...)` across dimensions that are not neighbours in memory, eager and compiled."""


_WHAT_TO_DO = {
    r"Expected more than 1 value per channel": "BatchNorm has no variance of one sample, such as the last batch of an "
    "epoch may have: give drop_last=True, or another batch_size.",
    r"got (Long|Int|Short|Char|Byte) and|Input type \((long|int|short|signed|unsigned)": "Layers multiply floats: give "
    "inputs.float() in the data.",
    r"index out of range in self": "An embedding of n rows takes the numbers 0 to n - 1.",
}
"""Hints for some of torch's messages."""
_ABOUT_LABELS = re.compile(r"Target -?\d+ is out of bounds")


def raise_explained(error: RuntimeError | ValueError | IndexError, model: nn.Module, batch: Any) -> NoReturn:
    """Raise an error of torch about shapes as one that names the batch and the layer; others as they are."""
    if _ABOUT_VIEWS.search(str(error)) and any(p.ndim > 3 and not p.is_contiguous() for p in model.parameters()):
        raise ModelError(
            "the model views an activation in another shape, and its convolutions are stored channels last",
            hint="Write x.reshape(...) or x.flatten(1) instead of x.view(...) in its forward, or channels_last=False.",
        ) from error
    if _ABOUT_LABELS.search(str(error)):
        _raise_about_labels(error)
    if not _ABOUT_SHAPES.search(str(error)) or isinstance(error, PhalanxError):
        raise error
    cause = _failed_layer(error.__traceback__, model)
    first = first_line(error)
    hints = (hint for pattern, hint in _WHAT_TO_DO.items() if re.search(pattern, first))
    hint = next(hints, "Change the data or the layer so that they agree.")
    raise ModelError(
        f"a batch of {shape_text(batch)} does not fit{' the model' if not cause else ''}: {cause or first}",
        hint=f"{hint} torch: {first}" if cause else "",
    ) from error


def _raise_about_labels(error: Exception) -> NoReturn:
    """Raise an error of the cross entropy about a label as one that names the labels of the batch and the outputs."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        output, labels = frame.f_locals.get("input"), frame.f_locals.get("target")
        if isinstance(output, torch.Tensor) and isinstance(labels, torch.Tensor):
            classes = output.shape[min(1, output.ndim - 1)]
            counted = labels[labels != IGNORED_LABEL]
            low, high = int(counted.min()), int(counted.max())
            hint = f"Give the model {high + 1} outputs, or labels that begin at 0."
            if low < 0:
                hint = f"Number the labels from 0; {IGNORED_LABEL} is the label that does not count."
            raise ModelError(
                f"the labels of a batch are {low} to {high}, and the model's {classes} outputs are for the labels 0 to "
                f"{classes - 1}",
                hint=hint,
            ) from error
    raise error


def _failed_layer(trace: TracebackType | None, model: nn.Module) -> str:
    """Return the innermost layer of torch, or else the loss, in whose call the error was raised, and what it got."""
    names = {id(module): name for name, module in model.named_modules()}
    text = ""
    while trace is not None:
        values = trace.tb_frame.f_locals
        layer, inputs, target = values.get("self"), values.get("input"), values.get("target")
        if isinstance(layer, nn.Module) and isinstance(inputs, torch.Tensor) and target is None:
            name = f"the layer '{names[id(layer)]}' " if names.get(id(layer)) else ""
            text = f"{name}{layer} got {shape_text(inputs)}"
        elif isinstance(inputs, torch.Tensor) and isinstance(target, torch.Tensor):
            text = f"the loss got an output {shape_text(inputs)} and a target {shape_text(target)}"
        trace = trace.tb_next
    return text
