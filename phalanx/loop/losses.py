"""The usual losses by name: `loss_fn="mse"`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from phalanx.errors import UsageError, unknown_name

LossFn = Callable[[Any, Any], torch.Tensor]


def class_axis(output: torch.Tensor, target: torch.Tensor) -> int:
    """Return the dimension of scores that holds the classes: 1, as torch has it, or the last where only that fits."""
    shape, labels = output.shape, target.shape
    if len(labels) < 2 or shape[:-1] != labels:
        return 1
    if shape[:1] + shape[2:] != labels:
        return -1
    warnings.warn(
        f"scores {list(shape)} for labels {list(labels)}: the classes are taken to be in dimension 1, as in torch. "
        "If they are in the last: loss_fn=lambda o, t: F.cross_entropy(o.flatten(0, -2), t.flatten())",
        stacklevel=2,
    )
    return 1


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of scores and labels; for sequences the classes may be in the last dimension."""
    if not target.is_floating_point() and class_axis(output, target) == -1:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.cross_entropy(output, target)


LOSSES: dict[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": F.binary_cross_entropy,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "nll": F.nll_loss,
}
_SAME = {
    "mae": "l1",
    "ce": "cross_entropy",
    "crossentropy": "cross_entropy",
    "categorical_crossentropy": "cross_entropy",
    "sparse_categorical_crossentropy": "cross_entropy",
    "mean_squared_error": "mse",
    "mean_absolute_error": "l1",
    "binary_cross_entropy": "bce",
    "binary_crossentropy": "bce",
    "bcewithlogits": "bce_with_logits",
    "smoothl1": "smooth_l1",
}
"""Names of torch's classes, of Keras and others."""


def find_loss(given: Any) -> LossFn | None:
    """Return the loss function of a name, or the one given; raise for what cannot be called with (output, target)."""
    hint = f"Give one of {', '.join(LOSSES)}, or a function: loss_fn=lambda output, target: ..."
    if isinstance(given, str):
        name = given.lower().replace("-", "_").removesuffix("loss").rstrip("_")
        name = _SAME.get(name, name)
        if name not in LOSSES:
            raise UsageError(unknown_name("loss", given, LOSSES), hint="Or give a function: loss_fn=lambda o, t: ...")
        return LOSSES[name]
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise UsageError(
            f"loss_fn = {given.__name__} is the class, not a loss", hint=f"Write: loss_fn={given.__name__}()"
        )
    if given is not None and not callable(given):
        raise UsageError(f"loss_fn = {given!r} is a {type(given).__name__}, which cannot be called", hint=hint)
    return given  # type: ignore[no-any-return]
