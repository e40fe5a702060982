"""Activation checkpointing: repeated blocks are recomputed in backward instead of keeping their activations."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable


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


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks: children of one class inside the outermost list or sequence that has several."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in found):
            continue  # inside a block already
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
            wide = [(key, child) for key, child in children if _is_block(child)]
            kinds = [type(child) for _, child in wide]
            found.update((key, child) for key, child in wide if kinds.count(type(child)) > 1)
    return found


def _is_block(module: nn.Module) -> bool:
    """A block has parameters and an inner structure; recomputing a bare layer would save nothing."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _recomputed(forward: Any, *arguments: Any, **options: Any) -> Any:
    return checkpoint(forward, *arguments, use_reentrant=False, **options)
