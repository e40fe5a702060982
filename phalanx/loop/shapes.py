"""What does not fit where a batch has the wrong shape: the layer or the loss, and what it got."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from phalanx.errors import ModelError

_ABOUT_SHAPES = re.compile(
    r"shapes? cannot be multiplied|size mismatch|must match the size|expected input.*to have|batch_size|"
    r"Given groups|normalized_shape|same size|shape .* is invalid|dimension out of range|must have same dtype|"
    r"expected scalar type|Expected .*dtype|should be the same|must be equal",
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


def raise_explained(error: RuntimeError, model: nn.Module, batch: Any) -> NoReturn:
    """Raise an error of torch about shapes as one that names the batch and the layer; others as they are."""
    if not _ABOUT_SHAPES.search(str(error)):
        raise error
    place = _place(error.__traceback__, model)
    first = str(error).splitlines()[0]
    raise ModelError(
        f"a batch of {shape_text(batch)} does not fit{' the model' if not place else ''}: {place or first}",
        hint=f"Change the data or the layer so that they agree. torch: {first}" if place else "",
    ) from error


def _place(trace: TracebackType | None, model: nn.Module) -> str:
    """Return the innermost layer of torch, or else the loss, in whose call the error was raised, and what it got."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    while trace is not None:
        values = trace.tb_frame.f_locals
        layer, given, target = values.get("self"), values.get("input"), values.get("target")
        if isinstance(layer, nn.Module) and isinstance(given, torch.Tensor) and target is None:
            name = f"the layer '{names[id(layer)]}' " if names.get(id(layer)) else ""
            found = f"{name}{layer} got {shape_text(given)}"
        elif isinstance(given, torch.Tensor) and isinstance(target, torch.Tensor):
            found = f"the loss got an output {shape_text(given)} and a target {shape_text(target)}"
        trace = trace.tb_next
    return found
