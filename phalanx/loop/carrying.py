"""A run's state in memory, carried over to other ranks: what a checkpoint does by files, without any.

Between two steps every rank holds the whole state, so a rank that outlives others needs no copy made beforehand: its
weights and moments are those after its last complete step. Only the data position has moved on with the batch that was
under way; it is noted after each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from phalanx.loop.hooks import Callback
from phalanx.loop.snapshot import put_back, shared_state, tensors_of

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation
    from phalanx.loop.hooks import StepInfo
    from phalanx.loop.trainer import TrainLoop


@dataclass(frozen=True)
class Carried:
    """What a rank that lives on knows of the run."""

    step: int
    run_id: str
    lineage: list[dict[str, Any]]
    world_size: int
    tensors: dict[str, Any]
    shared: dict[str, Any]


class Position(Callback):
    """Notes after each step how far the data were read."""

    def __init__(self) -> None:
        self.step = -1
        self.loaders: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: TrainLoop) -> None:
        """Note where the run begins or goes on."""
        self._note(trainer.formation)

    def on_step_end(self, trainer: TrainLoop, info: StepInfo) -> None:
        """Note what this step has read."""
        self._note(trainer.formation)

    def on_epoch_end(self, trainer: TrainLoop, epoch: int, metrics: dict[str, float]) -> None:
        """Note that the epoch is over and told of: whoever goes on begins the next one."""
        self._note(trainer.formation)

    def _note(self, formation: Formation) -> None:
        self.step = formation.step
        self.loaders = [loader.sharded.state_dict() for loader in formation.loaders]


def carry(loop: TrainLoop, position: Position) -> Carried | None:
    """Return the state after the last complete step; None before the run has begun. No other rank is asked."""
    formation = loop.formation
    if position.step < 0:
        return None
    shared = {**shared_state(formation), **loop.to_keep()}
    if formation.step == position.step:  # else the step was taken, and only its report failed
        shared["loaders"] = position.loaders
    tensors = tensors_of(formation)
    for model in formation.models:  # what the step that broke off has left there is no part of the next one
        model.zero_grad(set_to_none=True)
    return Carried(formation.step, formation.run_id, formation.lineage, formation.world_size, tensors, shared)


def take_over(formation: Formation, carried: Carried | None) -> dict[str, Any] | None:
    """Give all ranks the state that rank 0 carried here; return what was beside it, None where rank 0 has nothing."""
    identity = None if carried is None else (carried.step, carried.run_id, carried.lineage, carried.world_size)
    told = _tell(formation, identity)
    if told is None:
        return None
    step, formation.run_id, formation.lineage, before = told
    tensors = _share_tensors(formation, None if carried is None else carried.tensors)
    shared = _tell(formation, None if carried is None else carried.shared)
    formation.notes.append(f"the ranks were {before} and are {formation.world_size}: going on after step {step}")
    return {**put_back(formation, tensors, step, dict(shared)), "path": f"the memory of rank 0 (step {step})"}


@dataclass(frozen=True)
class _Described:
    """A tensor on its way: what a rank that lacks it must make room for."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool


def _share_tensors(formation: Formation, own: dict[str, Any] | None) -> dict[str, Any]:
    """Give all ranks rank 0's tree of tensors and plain values; the trees of newcomers may be of another shape."""
    own = own if formation.is_main else None
    described = _tell(formation, pytree.tree_map_only(torch.Tensor, _describe, own))
    places, shape = pytree.tree_flatten(described)
    held = iter(places if own is None else pytree.tree_leaves(own))
    values = [_share(formation, place, next(held)) for place in places]
    tree: dict[str, Any] = pytree.tree_unflatten(values, shape)
    return tree


def _describe(tensor: torch.Tensor) -> _Described:
    return _Described(tensor.shape, tensor.dtype, tensor.device.type == "cpu")


def _share(formation: Formation, place: Any, held: Any) -> Any:
    if not isinstance(place, _Described):
        return place
    if isinstance(held, torch.Tensor):
        value = held.detach().to(formation.device, copy=True)
    else:
        value = torch.empty(place.shape, dtype=place.dtype, device=formation.device)
    if formation.world_size > 1:
        dist.broadcast(value, src=0)
    return value.cpu() if place.on_host else value


def _tell(formation: Formation, what: Any) -> Any:
    box = [what if formation.is_main else None]
    if formation.world_size > 1:
        dist.broadcast_object_list(box, src=0, device=formation.device)
    return box[0]
