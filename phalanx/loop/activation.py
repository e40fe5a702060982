"""Activation checkpointing: repeated blocks are recomputed in backward instead of keeping their activations."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

from phalanx.errors import ModelError
from phalanx.strategies.blocks import find_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def checkpoint_activations(model: nn.Module) -> Callable[[], None]:
    """Recompute each repeated block of the model in backward; return what undoes it."""
    blocks = find_blocks(model)
    if not blocks:
        raise ModelError(
            f"activation_checkpointing: {type(model).__name__} has no repeated blocks to recompute",
            hint="It looks for an nn.ModuleList or nn.Sequential with several blocks of one class.",
        )
    for block in blocks.values():
        block.forward = partial(_recomputed, block.forward)

    def undo() -> None:
        for block in blocks.values():
            block.__dict__.pop("forward", None)

    return undo


def _recomputed(forward: Any, *arguments: Any, **options: Any) -> Any:
    return checkpoint(forward, *arguments, use_reentrant=False, **options)
