"""Allocates and initialises a model that was built on the meta device, once it is sharded."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from phalanx.errors import UsageError
from phalanx.models.contract import Adapter, InitialisesWeights, implements
from phalanx.strategies.base import COALESCED_BYTES, local

if TYPE_CHECKING:
    from torch import nn


def is_meta(model: nn.Module) -> bool:
    """Whether parameters of the model have shapes only."""
    return any(parameter.is_meta for parameter in model.parameters())


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
            if implements(module, Adapter):
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
        dist._broadcast_coalesced(group, tensors, COALESCED_BYTES, 0)
