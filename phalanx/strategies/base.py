"""What a strategy is: the few things that differ between ways of sharing the work. The loop knows nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

from phalanx.errors import UsageError
from phalanx.strategies.optimizer_state import load_optimizer_state, optimizer_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.config import DistributedConfig
    from phalanx.world.world import World


_LAYOUT = "_phalanx_layout"
COALESCED_BYTES = 250 * 1024 * 1024
"""How much is sent at a time where many small tensors go from one rank to all."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: the memory itself, not a copy."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    # DeepSpeed's stage 3 leaves the parameter itself empty, and a rank's part beside it.
    part: torch.Tensor = getattr(tensor, "ds_tensor", tensor)
    return part


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as every rank can use it: a sharded one gathered from all ranks, any other as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for axis in range(len(placements)):  # the outer axes cut last: one gather undoes each, where torch warns of several
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def part_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that all ranks have whole as `like` is laid over them: what `whole` does, backwards."""
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    placements: list[Any] = [Replicate()] * mesh.ndim
    part = DTensor.from_local(tensor.to(like.device), mesh, placements, run_check=False)
    for axis in reversed(range(mesh.ndim)):  # each cut is made by the rank itself: nothing is sent
        placements[axis] = like.placements[axis]
        part = part.redistribute(placements=placements)
    return part


def share_weights(model: nn.Module) -> None:
    """Start from rank 0's weights: ranks that drew their own would hold parts of different models."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    if tensors:
        dist._broadcast_coalesced(dist.distributed_c10d._get_default_group(), tensors, COALESCED_BYTES, 0)


def equalise(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give the ranks of a group what the first of them holds of these parameters."""
    parts = [local(parameter.detach()) for parameter in parameters]
    if parts:
        dist._broadcast_coalesced(group, parts, COALESCED_BYTES, 0)


def claim_layout(model: nn.Module, layout: str | None) -> None:
    """Refuse a model that an earlier run in this process laid over the ranks in another way; mark it with this one."""
    before = model.__dict__.get(_LAYOUT)
    if before is not None and before != layout:
        raise UsageError(
            f"this model lies over the ranks already as {before}, and cannot be laid out as {layout or 'whole copies'}",
            hint="Build a fresh model: weights move with trainer.save() and load(), or in checkpoints.",
        )
    if layout is not None:
        model.__dict__[_LAYOUT] = layout


class Strategy:
    """Lays a model over the ranks. Subclasses override only what their way of sharing changes."""

    name: ClassVar[str]
    shards: ClassVar[bool] = False
    """Whether ranks hold parts of the model: then whole weights have to be gathered, and the group outlives a fit."""
    in_lockstep: ClassVar[bool] = True
    """Whether no rank can complete a step that another one has not begun; else ranks meet only where the loop does, and
    where `has_just_met` says so."""
    has_just_met: bool = False
    """Whether all ranks have waited for each other in the step just taken; equal on all of them."""

    optional_state: ClassVar[tuple[str, ...]] = ()
    """What `state` holds that a checkpoint of another strategy lacks: it then starts afresh."""

    def __init__(self, config: DistributedConfig, world: World) -> None:
        self.config = config
        self.world = world

    @property
    def layout(self) -> str | None:
        """How this strategy changes a model for good, in words; None: it leaves it whole."""
        return None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model that the loop calls; its parameters stay those of `model`."""
        return model

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the user's own model."""
        return wrapped

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Say, before a forward pass, whether its backward pass must leave synchronised gradients."""

    def settle(self, wrapped: nn.Module) -> None:
        """Make equal on all ranks what each let drift (running statistics), before it is saved or evaluated.

        Rank 0's are taken, as DDP itself does before every forward pass; after the last one nobody does.
        """
        buffers = [local(buffer) for buffer in self.unwrap(wrapped).buffers()]
        if self.world.world_size > 1 and buffers:
            with torch.no_grad():
                dist._broadcast_coalesced(dist.distributed_c10d._get_default_group(), buffers, COALESCED_BYTES, 0)

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale gradients so that their one global norm is at most `max_norm`; return the norm before."""
        return whole(nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True))

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the one global gradient norm, equal on all ranks."""
        return whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True))

    def state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return model and optimizer state under canonical parameter names, ready to be saved at any layout."""
        model = self.unwrap(wrapped)
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        for number, optimizer in enumerate(optimizers):
            state[f"optimizer{number or ''}"] = optimizer_state(model, optimizer)
        return state

    def load_state(
        self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]
    ) -> None:
        """Put back what `state` returned, possibly written at another layout."""
        model = self.unwrap(wrapped)
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=True))
        for number, optimizer in enumerate(optimizers):
            load_optimizer_state(model, optimizer, state[f"optimizer{number or ''}"])
