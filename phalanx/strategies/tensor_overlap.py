"""Tensor parallelism whose products overlap with their gathers and scatters ("async", micro-pipelined).

torch.compile replaces an all-gather before a product, and a reduce-scatter after one, by an operation that copies a
slice from another GPU while the one before is multiplied (`symm_mem::fused_all_gather_matmul` and
`symm_mem::fused_matmul_reduce_scatter`). That needs GPUs that read each other's memory, and layers between which the
sequence is split. It is used wherever that is so.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from phalanx import torch_compat
from phalanx.errors import first_line
from phalanx.world.world import World

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

ALLOW_SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's variable: with 1, ranks on one GPU may share memory too, which shows that it works, not how fast it is."""


class Overlap:
    """Whether the compiled tensor products of this rank overlap with their communication, and else why not."""

    def __init__(self) -> None:
        self.note = ""
        """Why they do not, for users who would expect it."""
        self._undo: Callable[[], None] | None = None

    def begin(self, world: World, group: dist.ProcessGroup, *, splits_sequence: bool) -> bool:
        """Let what is compiled from now on overlap where it can; return whether it does. All ranks call this.

        `splits_sequence`: the model's plan has different slices on the ranks between the layers.
        """
        if self._undo is None and self._is_possible(world, group, splits_sequence):
            self._undo = torch_compat.overlap_products(group)
        return self._undo is not None

    def _is_possible(self, world: World, group: dist.ProcessGroup, splits_sequence: bool) -> bool:
        if world.device.type != "cuda" or not torch_compat.has_triton():
            return False
        if world.ranks_per_gpu > 1 and os.environ.get(ALLOW_SHARED) != "1":
            return False
        reason = _why_not(world, splits_sequence) or _share_memory(world, group)
        if reason:
            self.note = f"tensor_parallel: products do not overlap with their communication: {reason}"
        return not reason

    def end(self) -> None:
        """Compile products as usual from now on, and release the memory that the GPUs share."""
        if self._undo is not None:
            self._undo()
            self._undo = None


def _why_not(world: World, splits_sequence: bool) -> str:
    """Return why not, equal on all ranks of an axis; empty where nothing is known that prevents it."""
    if not splits_sequence:
        return "the model's plan keeps whole sequences between the layers"
    env, ranks = world.env, world.mesh.tp
    first = env.local_rank - world.mesh.coordinates(world.rank)["tp"]
    if first < 0 or first + ranks > env.local_world_size:
        return f"its {ranks} ranks are not on one node"
    begin = env.number_here - env.local_rank + first
    devices = {number % torch.cuda.device_count() for number in range(begin, begin + ranks)}
    for one, other in itertools.permutations(sorted(devices), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"GPU {one} cannot read the memory of GPU {other}"
    return ""


def _share_memory(world: World, group: dist.ProcessGroup) -> str:
    """Let the GPUs of a group read each other's memory; return why they do not, on all ranks if on one."""
    reason = ""
    try:
        torch_compat.share_memory(group)
    except RuntimeError as error:
        reason = first_line(error)
    shared = torch.tensor(0 if reason else 1, device=world.device)
    dist.all_reduce(shared, dist.ReduceOp.MIN, group=group)
    return reason or ("" if shared.item() else "another rank of the axis could not share its memory")


class ProductBeforeBias(nn.Linear):
    """A split linear layer that multiplies, and adds its bias in a hook: to what a row-wise layer has scattered.

    torch.compile overlaps only plain products with communication. For example, row-wise:
    scatter(inputs @ weight.t() + bias / ranks) is scatter(inputs @ weight.t()) + bias.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs @ weight.t()."""
        return F.linear(inputs, self.weight)


def add_bias_apart(layer: nn.Module, style: str) -> None:
    """Let a linear layer, split "colwise" or "rowwise", add its bias after the product."""
    layer.__class__ = ProductBeforeBias  # in place; a method of the object would be compiled anew for each layer
    layer.register_forward_hook(_add_to_slice if style == "rowwise" else _add_to_features)


def _add_to_features(layer: nn.Module, _: Any, product: Tensor) -> Tensor:
    return product + _local_bias(layer).to(product.dtype)


def _add_to_slice(layer: nn.Module, _: Any, product: Tensor) -> Tensor:
    """Add the bias to this rank's slice of the sequence: its gradient is a part of a sum over the ranks."""
    return product + _local_bias(layer, Partial()).to(product.dtype)


def _local_bias(layer: nn.Module, *gradient: Placement) -> Tensor:
    bias = layer.get_parameter("bias")
    assert isinstance(bias, DTensor), "split by the style"
    return bias.to_local(grad_placements=gradient or None)
