"""A run's state moved to other ranks in memory, without files, when ranks are lost or added.

Between two steps every rank holds the whole state, so a surviving rank needs no copy made beforehand: its weights and
moments are those after its last complete step. Only the data position has advanced with the batch under way; it is
noted after each step.
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
    """What a surviving rank knows of the run."""

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
        """Note where the run begins or resumes."""
        self._note(trainer.formation)

    def on_step_end(self, trainer: TrainLoop, info: StepInfo) -> None:
        """Note what this step has read."""
        self._note(trainer.formation)

    def on_epoch_end(self, trainer: TrainLoop, epoch: int, metrics: dict[str, float]) -> None:
        """Note that the epoch is over and reported: a surviving rank begins the next one."""
        self._note(trainer.formation)

    def _note(self, formation: Formation) -> None:
        self.step = formation.step
        self.loaders = [loader.sharded.state_dict() for loader in formation.loaders]


def carry(loop: TrainLoop, position: Position) -> Carried | None:
    """Return the state after the last complete step; None before the run has begun. Without communication."""
    formation = loop.formation
    if position.step < 0:
        return None
    shared = {**shared_state(formation), **loop.to_keep()}
    if formation.step == position.step:  # else the step was taken, and only its report failed
        shared["loaders"] = position.loaders
    tensors = tensors_of(formation)
    for model in formation.models:  # gradients of the interrupted step are not part of the next one
        model.zero_grad(set_to_none=True)
    return Carried(formation.step, formation.run_id, formation.lineage, formation.world_size, tensors, shared)


def take_over(formation: Formation, carried: Carried | None) -> dict[str, Any] | None:
    """Broadcast the state that rank 0 holds; return what is not part of a `Prepared`, None where rank 0 has none."""
    identity = None if carried is None else (carried.step, carried.run_id, carried.lineage, carried.world_size)
    shown = _broadcast(formation, identity)
    if shown is None:
        return None
    step, formation.run_id, formation.lineage, before = shown
    tensors = _share_tensors(formation, None if carried is None else carried.tensors)
    shared = _broadcast(formation, None if carried is None else carried.shared)
    formation.notes.append(f"the ranks were {before} and are {formation.world_size}: going on after step {step}")
    return {**put_back(formation, tensors, step, dict(shared)), "path": f"the memory of rank 0 (step {step})"}


@dataclass(frozen=True)
class _Described:
    """Shape and dtype of a tensor that a rank allocates before it is broadcast."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool


def _share_tensors(formation: Formation, own: dict[str, Any] | None) -> dict[str, Any]:
    """Broadcast rank 0's tree of tensors and plain values; trees of new ranks may have another structure."""
    own = own if formation.is_main else None
    described = _broadcast(formation, pytree.tree_map_only(torch.Tensor, _describe, own))
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


def _broadcast(formation: Formation, what: Any) -> Any:
    box = [what if formation.is_main else None]
    if formation.world_size > 1:
        dist.broadcast_object_list(box, src=0, device=formation.device)
    return box[0]
