"""Activations of the repeated blocks: recomputed in backward instead of kept, or kept in CPU memory.

Blocks are changed before a strategy wraps them, and only in the instance's `forward`: names of parameters stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.errors import ModelError
from phalanx.loop.offload import HostMemory
from phalanx.strategies.fsdp import find_blocks


def spare_activations(model: nn.Module, config: DistributedConfig) -> Callable[[], None]:
    """Recompute or offload the activations of the model's blocks, as the config asks; return what undoes it."""
    recompute = config.recompute
    if recompute is None and not config.activation_offload:
        return lambda: None
    blocks = _blocks(model, config)
    # Weakly: in a pipeline most blocks are on other ranks, and must not be kept here to be undone.
    before = [(weakref.ref(block), block.__dict__.get("forward")) for block in blocks]
    if recompute is not None:
        context = _SELECTIVE if recompute.selective else {}
        for block in blocks[:: recompute.every]:
            block.forward = partial(_recomputed, block.forward, context)
    if config.activation_offload:  # outside: of a block that is recomputed only the input is left to move
        memory = HostMemory(with_compiler=config.compile)
        # With compile each block is a separate graph, between copies that are not compiled.
        offloaded: Callable[..., Any] = _offloaded
        if config.compile:
            offloaded = torch.compiler.disable(_offloaded, recursive=False)  # type: ignore[no-untyped-call]
        for block in blocks:
            block.forward = partial(offloaded, block.forward, memory)

    def undo() -> None:
        for held, forward in before:
            block = held()
            if block is None:
                continue
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.forward = forward

    del blocks
    return undo


def _blocks(model: nn.Module, config: DistributedConfig) -> list[nn.Module]:
    blocks, recompute, name = list(find_blocks(model).values()), config.recompute, type(model).__name__
    if not blocks:
        setting = "activation_offload" if recompute is None else "activation_checkpointing"
        raise ModelError(
            f"{setting}: {name} has no repeated blocks",
            hint="It looks for an nn.ModuleList or nn.Sequential with several blocks of one class.",
        )
    if recompute is not None and recompute.every > len(blocks):
        raise ModelError(
            f"activation_checkpointing = 'every {recompute.every}': {name} has {len(blocks)} blocks only",
            hint=f"Write a number from 1 (every block) to {len(blocks)} (the first alone).",
        )
    return blocks


def _recomputed(forward: Any, context: dict[str, Any], *arguments: Any, **options: Any) -> Any:
    return checkpoint(forward, *arguments, use_reentrant=False, **context, **options)


def _offloaded(forward: Any, memory: HostMemory, *arguments: Any, **options: Any) -> Any:
    with memory.block():
        return forward(*arguments, **options)


def _found(library: Any, names: str) -> list[Any]:
    """Return the default overloads of the operations that this torch has: not every build has every kernel."""
    return [getattr(library, name).default for name in names.split() if hasattr(library, name)]


_EXPENSIVE = {
    *_found(torch.ops.aten, "mm addmm bmm baddbmm convolution _scaled_mm _grouped_mm"),
    *_found(
        torch.ops.aten,
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    *_found(
        torch_compat.functional_collectives(),
        "all_gather_into_tensor reduce_scatter_tensor all_reduce all_to_all_single wait_tensor",
    ),
}
"""What selective checkpointing keeps: matrix products, attention, and results of collectives."""

_DROPOUT_POSITION = {
    operation: position
    for operation in _EXPENSIVE
    for position, name in enumerate(torch_compat.argument_names(operation))
    if name == "dropout_p"
}


def _keep_or_recompute(_: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Keep expensive outputs, unless they drew random numbers.

    A kept output is not drawn again in backward, and every mask after it would then come out different.
    """
    if operation not in _EXPENSIVE:
        return CheckpointPolicy.PREFER_RECOMPUTE
    position = _DROPOUT_POSITION.get(operation)
    if position is not None and (arguments[position] if position < len(arguments) else options.get("dropout_p", 0.0)):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


_SELECTIVE: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_or_recompute)}
