"""What strategies ask of models and batches, and do to tensors.

Repeated blocks, memory for models on the meta device, the mean of tensors over ranks, the norm of sharded tensors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from phalanx import torch_compat
from phalanx.errors import UsageError
from phalanx.model import AdapterLayer, InitialisesWeights, implements
from phalanx.strategies.base import local
from phalanx.torch_compat import pytree

PLACED = "_phalanx_placed"
"""Attribute of a model that a pipeline has placed: its `RankStages`."""


def count_rows(batch: Any) -> int:
    """Return the samples of a batch."""
    return next(leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks: children of one class inside the outermost list or sequence that has several."""
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in blocks):
            continue  # inside a block already
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
            wide = [(key, child) for key, child in children if _is_block(child)]
            kinds = [type(child) for _, child in wide]
            blocks.update((key, child) for key, child in wide if kinds.count(type(child)) > 1)
    return blocks


def _is_block(module: nn.Module) -> bool:
    """Whether a module has parameters and children; recomputing a single layer would save nothing."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def is_placed(model: nn.Module) -> bool:
    """Whether a pipeline has placed the stages of this model on several ranks."""
    return PLACED in model.__dict__


def is_meta(model: nn.Module) -> bool:
    """Whether parameters of the model have shapes only."""
    return any(parameter.is_meta for parameter in model.parameters())


def drop_gathered(model: nn.Module) -> None:
    """Make a sharded model's parameters its shards again, where they have been whole since a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def materialise(model: nn.Module, device: torch.device | str) -> None:
    """Allocate this rank's part of the model and initialise it; replicas are equal."""
    if not implements(model, InitialisesWeights):
        raise UsageError(
            f"{type(model).__name__} was built on the meta device and has no init_weights()",
            hint="Give it a method init_weights() that draws all weights in place, or build it on the CPU.",
        )
    model.to_empty(device=device)
    with warnings.catch_warnings():
        # On the CPU torch cannot draw the whole tensor's numbers; each rank draws its shard.
        warnings.filterwarnings("ignore", message="DTensor random operators", category=UserWarning)
        model.init_weights()
        for module in model.modules():
            if implements(module, AdapterLayer):
                module.reset_adapter()
    _share_replicas(model)


def _share_replicas(model: nn.Module) -> None:
    """Broadcast the first replica's weights: on the CPU every rank drew different ones."""
    replicas: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            for axis, placement in enumerate(tensor.placements):
                if placement.is_replicate() and mesh.size(axis) > 1:
                    replicas.setdefault(mesh.get_group(axis), []).append(local(tensor.detach()))
    for group, tensors in replicas.items():
        torch_compat.broadcast_coalesced(tensors, group)


def average(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Average tensors over the ranks of a group, in place and in one message for each dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        else:
            dist.all_reduce(tensor, group=group)
            tensor /= dist.get_world_size(group)
    for same in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in same])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        parts = flat.split([tensor.numel() for tensor in same])  # type: ignore[no-untyped-call]
        torch_compat.foreach_copy_(same, [part.view_as(tensor) for part, tensor in zip(parts, same, strict=True)])


def global_norm(gradients: Sequence[torch.Tensor], holders: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the norm of all gradients, on any meshes, with one all-reduce over the world.

    `holders`: how many ranks hold each gradient, sharded or copied. Of an element that several ranks hold, each counts
    its share.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        parts = [local(gradient) for gradient in gradients]
        norms = torch.stack([norm.double() for norm in torch_compat.foreach_norm(parts)])
        shares = [_parts(gradient) / ranks for gradient, ranks in zip(gradients, holders, strict=True)]
        total = (norms.square() * torch.tensor(shares, dtype=torch.float64).to(norms.device)).sum()
    dist.all_reduce(total)
    return total.sqrt()


def scale_to_norm(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients of this norm down to `max_norm`, without synchronising with the device."""
    if not gradients:
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch_compat.foreach_mul_([local(gradient) for gradient in gradients], factor)


def _parts(gradient: torch.Tensor) -> int:
    """Return into how many different parts a gradient is cut."""
    if not isinstance(gradient, DTensor):
        return 1
    mesh = gradient.device_mesh  # not is_shard: torch does not count the strided shards of two axes as such
    return math.prod(
        mesh.size(axis) for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()
    )
