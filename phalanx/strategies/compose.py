"""Strategies together, on one mesh: what a layer is cut into first, then the data axes over what is left."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from phalanx.strategies.base import COALESCED_BYTES
from phalanx.strategies.context import split_context
from phalanx.strategies.fsdp import FSDP
from phalanx.strategies.norm import global_norm, scale_to_norm
from phalanx.strategies.tensor import is_split, split_tensors, splits_sequence
from phalanx.world.groups import build_axis_group
from phalanx.world.seed import seed_everything

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


class Composed(FSDP):
    """Every layout with an axis beside the data axes; those are laid over the rest by `fully_shard`.

    The data axes are sharded under strategy="ddp" too: torch's DDP cannot average DTensors.
    """

    name = "composed"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Split the model in place, then shard it over the data axes, if there are any."""
        mesh = self.world.mesh
        if is_split(model):
            return model
        self._share_weights(model)
        if mesh.tp > 1:
            split_tensors(model, self.device_mesh["tp"], loss_parallel=self.config.loss_parallel)
            if not splits_sequence(model):  # equal activations want equal dropout
                place = mesh.place(self.world.rank)["cp"]
                seed_everything(self.config.seed, rank=self.world.dp_rank * mesh.cp + place)
        if mesh.cp > 1:
            split_context(model, build_axis_group(mesh, ("cp",), self.world.rank))
        if mesh.dp_size * mesh.cp > 1:
            # Outputs of a DTensor module always are views: fully_shard would warn in every run.
            warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
            return super().wrap(model)
        if any(parameter.is_meta for parameter in model.parameters()):
            self._materialise(model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_complete_gradient)  # type: ignore[no-untyped-call]
        return model

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale gradients to the one norm over all axes."""
        gradients = _gradients(parameters)
        norm = global_norm(gradients, self.world.world_size)
        scale_to_norm(gradients, norm, max_norm)
        return norm

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the one norm over all axes."""
        return global_norm(_gradients(parameters), self.world.world_size)

    def _share_weights(self, model: nn.Module) -> None:
        """Start from rank 0's weights: ranks that drew their own would hold parts of different models."""
        tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
        if tensors:
            group: Any = dist.distributed_c10d._get_default_group()
            dist._broadcast_coalesced(group, tensors, COALESCED_BYTES, 0)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _complete_gradient(parameter: torch.Tensor) -> None:
    """Add up what each slice of the sequence gave a parameter that all ranks hold; fully_shard does this itself."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
