"""Activations of the repeated blocks: recomputed in backward instead of kept, or kept in CPU memory.

Blocks are changed before a strategy wraps them, and only in the instance's `forward`: names of parameters stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.errors import ModelError
from phalanx.speed.offload import HostMemory
from phalanx.strategies.tensors import find_blocks


def spare_activations(model: nn.Module, config: DistributedConfig) -> Callable[[], None]:
    """Recompute or offload the activations of the model's blocks, as the config asks; return what undoes it."""
    recompute = config.recompute
    if recompute is not None and recompute.budget is not None:
        return torch_compat.keep_activations(recompute.budget)
    blocks = _blocks(model, config)
    # Weakly: in a pipeline most blocks are on other ranks, and must not be kept here to be undone.
    before = [(weakref.ref(block), block.__dict__.get("forward")) for block in blocks]
    cached = [] if recompute is None else _cached(model)
    if recompute is not None:
        contexts = _selective if recompute.selective else noop_context_fn
        for block in blocks[:: recompute.every]:
            block.forward = partial(_recomputed, block.forward, _Buffers(block), contexts)
    for config_of_model in cached:
        config_of_model.use_cache = False
    if config.activation_offload:  # outside: of a block that is recomputed only the input is left to move
        memory = HostMemory(with_compiler=config.compile)
        # With compile each block is a separate graph, between copies that are not compiled.
        offloaded: Callable[..., Any] = _offloaded
        if config.compile:
            offloaded = torch.compiler.disable(_offloaded, recursive=False)  # type: ignore[no-untyped-call]
        for block in blocks:
            block.forward = partial(offloaded, block.forward, memory)

    def undo() -> None:
        for reference, forward in before:
            block = reference()
            if block is None:
                continue
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.forward = forward
        for config_of_model in cached:
            config_of_model.use_cache = True

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


def _cached(model: nn.Module) -> list[Any]:
    """Return the configs of Hugging Face models that fill a key-value cache: a block that runs again would find it."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if getattr(config, "use_cache", False) is True}.values())


_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""In which a block runs first, and in which it is recomputed."""


class _Buffers:
    """The buffers that a block changes when it runs, such as BatchNorm's statistics: recomputing leaves them alone.

    It computes with their values from before the first pass, on which the outputs may depend (spectral_norm).
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = [module for module in block.modules() if _buffers_of(module)]
        self._changing: set[nn.Module] | None = None
        """The modules whose buffers are copied before each pass, because they changed in an earlier one; None: all."""

    def contexts(self, inner: Callable[[], _Contexts]) -> _Contexts:
        """Return both contexts for one call of the block, around those of `inner`."""
        first, again = inner()
        if not self._modules:
            return first, again
        before: dict[nn.Module, dict[str, torch.Tensor]] = {}
        # Outermost: selective recomputation must not record the copies.
        return _nested(self._copying(before), first), _nested(_replaced(before), again)

    @contextmanager
    def _copying(self, before: dict[nn.Module, dict[str, torch.Tensor]]) -> Iterator[None]:
        buffers = [_buffers_of(module) for module in self._modules]  # else the id of one that is replaced is used again
        versions = {module: _versions(module) for module in self._modules}
        copies = {module: _copy(module) for module in (self._modules if self._changing is None else self._changing)}
        yield
        # Per module: torch does not count what batch_norm writes into running_mean, but num_batches_tracked tells.
        changed = [module for module in self._modules if _versions(module) != versions[module]]
        before.update((module, copies[module] if module in copies else _copy(module)) for module in changed)
        self._changing = {*(self._changing or ()), *changed}
        del buffers


def _buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_buffers(recurse=False))


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    return [(id(buffer), torch_compat.version_of(buffer)) for buffer in _buffers_of(module).values()]


def _copy(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in _buffers_of(module).items()}


@contextmanager
def _replaced(before: dict[nn.Module, dict[str, torch.Tensor]]) -> Iterator[None]:
    buffers_by_module = {module: _buffers_of(module) for module in before}
    for module, buffers in before.items():
        for name, buffer in buffers.items():
            setattr(module, name, buffer.clone())  # a copy: the graph may be run backward twice
    try:
        yield
    finally:
        for module, buffers in buffers_by_module.items():
            for name, buffer in buffers.items():
                setattr(module, name, buffer)


@contextmanager
def _nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _recomputed(
    forward: Any, buffers: _Buffers, contexts: Callable[[], Any], /, *arguments: Any, **options: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    chosen: dict[str, Any] = {"context_fn": partial(buffers.contexts, contexts)}
    if torch.compiler.is_compiling():  # compiled code writes buffers in the first pass alone
        chosen = {} if contexts is noop_context_fn else {"context_fn": contexts}
    # The options are bound, because the function has its own options ("debug").
    return checkpoint(partial(forward, **options), *arguments, use_reentrant=False, **chosen)


def _offloaded(forward: Any, memory: HostMemory, /, *arguments: Any, **options: Any) -> Any:
    with memory.block():
        return forward(*arguments, **options)


def _overloads(library: Any, names: str) -> list[Any]:
    """Return the default overloads of the operations that this torch has: not every build has every kernel."""
    return [getattr(library, name).default for name in names.split() if hasattr(library, name)]


_EXPENSIVE = {
    *_overloads(torch.ops.aten, "mm addmm bmm baddbmm convolution _scaled_mm _grouped_mm"),
    *_overloads(
        torch.ops.aten,
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    *_overloads(
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


_selective = partial(create_selective_checkpoint_contexts, _keep_or_recompute)
