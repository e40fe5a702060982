"""torch.compile in place: the user's model object is the one that is trained, and is uncompiled afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def compile_in_place(model: nn.Module) -> Callable[[], None]:
    """Compile the calls of the user's own model, inside its wrapper; return what undoes it.

    Not the wrapper: torch would compile the insides of DDP, dozens of frames and more with every step, whereas of a
    model inside DDP it makes one graph and cuts that by DDP's buckets.
    """
    model._compiled_call_impl = torch.compile(_call_of(model))

    def undo() -> None:
        model._compiled_call_impl = None

    return undo


def _call_of(model: nn.Module) -> Callable[..., Any]:
    """Return the model's call as a plain function: torch skips the calls of its own modules (nn.Sequential)."""
    inner: Callable[..., Any] = model._call_impl

    def call(*arguments: Any, **options: Any) -> Any:
        return inner(*arguments, **options)

    return call
