"""The state of a run that must survive a change of its ranks: one object, captured and restored in one place.

It is what a checkpoint holds (`state.py`): weights, optimizers, averages, loss scale, data position and order, random
states; and what the loop adds (`loop_state`): schedules with their bases, the best checkpoint, early stopping, history,
callbacks, the time spent, and whether the run has ended. A new rank receives this object and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx.checkpoint import Snapshot
from phalanx.loop.evaluate import Evaluation
from phalanx.loop.formation import Formation
from phalanx.loop.hooks import Callback
from phalanx.loop.optim import rate_factor
from phalanx.loop.state import put_back, snapshot_of
from phalanx.loop.step_info import StepInfo
from phalanx.loop.train_state import TrainState, count_steps
from phalanx.torch_compat import foreach_copy_, pytree
from phalanx.world.abort import complete, raise_if_aborted
from phalanx.world.seed import set_rng_state

if TYPE_CHECKING:
    from phalanx.loop.running_trainer import RunningTrainer


def loop_state(state: TrainState, evaluation: Evaluation) -> dict[str, Any]:
    """Return what the loop adds to the state of what it has prepared, as plain values, equal on all ranks."""
    control = state.control.state_dict()
    return {
        **state.report.to_keep(),
        "schedule": state.schedule.state_dict(),
        "watched": {"best": state.checkpoints.best.state_dict(), "stopping": control.pop("stopping")},
        "evaluation": evaluation.state_dict(),
        "callbacks": state.hooks.state_dict(),
        "classes": state.task.classes,
        "columns": state.task.columns,
        **control,
    }


def load_loop_state(
    state: TrainState,
    evaluation: Evaluation,
    restore_best: Callable[[dict[str, Any] | None, str], None],
    saved: dict[str, Any],
) -> None:
    """Continue from what `loop_state` returned, and from its "path"; all ranks call this.

    `restore_best`: see `CheckpointWriter`.
    """
    # If nothing was kept yet, ranks that were replaced begin with another run's checkpoint, as their run did.
    state.continues = state.regrouped and state.formation.state_of == state.formation.run_id
    state.report.resumed(saved, same_run=state.continues)
    if (unreported := saved.pop("unreported", None)) is not None:
        state.hooks.unreported = StepInfo(**unreported)
    state.hooks.called = saved.pop("called", {})
    state.hooks.load_state_dict(saved.get("callbacks", {}), state.report.say)
    evaluation.load_state_dict(saved.get("evaluation"))
    watched = saved.get("watched", {})
    restore_best(watched.get("best"), saved["path"])
    state.control.load_state_dict({**saved, "stopping": watched.get("stopping")}, state.epoch, same_run=state.continues)
    if "schedule" in saved:
        state.schedule.load_state_dict(saved["schedule"])
    if state.optimizer_settings is not None and not state.continues:
        state.optimizer_settings.put_back(state.optimizer)
    total = count_steps(state.formation, state.train_loader)
    if total != state.total_steps:  # another number of ranks: the same epochs take another number of steps
        state.total_steps = total
        state.schedule.reshape(rate_factor(state.config, total))


@dataclass(frozen=True)
class RunState:
    """Everything that a run has after its last complete step."""

    world_size: int
    """The ranks of the group that had it."""
    content: Snapshot
    unread: list[torch.Tensor]
    """The losses of complete steps that were not read, and their weights."""

    @property
    def step(self) -> int:
        """The last complete step."""
        return self.content.step

    def read_losses(self) -> None:
        """Add losses that were not read to those of the epoch.

        Not when the state is captured: the device may still wait for a lost rank.
        """
        rows = torch.stack(self.unread).tolist() if self.unread else []
        self.unread.clear()
        for total, weight in rows:
            for sum_of in self.content.shared["losses"].values() if math.isfinite(total) else ():
                sum_of["total"] += total
                sum_of["weight"] += weight


class StepBoundary(Callback):
    """Notes after each step what an interrupted step changes: how far the data were read, and the buffers."""

    def __init__(self) -> None:
        self.step = -1
        self.loaders: list[dict[str, Any]] = []
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Note where the run begins or resumes."""
        self._buffers = [buffer for model in trainer.formation.models for buffer in model.buffers()]
        self._copies = [buffer.clone() for buffer in self._buffers]
        self._note(trainer.formation)

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """Note what this step has read."""
        self._note(trainer.formation)

    def on_epoch_end(self, trainer: RunningTrainer, epoch: int, metrics: dict[str, float]) -> None:
        """Note that the epoch is over and reported: a surviving rank begins the next one."""
        self._note(trainer.formation)

    def put_buffers_back(self) -> None:
        """Undo what the forward passes of an interrupted step did to the buffers."""
        if self._buffers:
            with torch.no_grad():
                foreach_copy_(self._buffers, self._copies)

    def _note(self, formation: Formation) -> None:
        self.step = formation.step
        self.loaders = [loader.sharded.state_dict() for loader in formation.loaders]
        if self._buffers:
            with torch.no_grad():
                foreach_copy_(self._copies, self._buffers)


def capture(state: TrainState, evaluation: Evaluation, boundary: StepBoundary) -> RunState | None:
    """Return the state after the last complete step; None before the run has begun. Without communication.

    Its tensors are those in use, not copies.
    """
    formation = state.formation
    if boundary.step < 0:
        return None
    content = snapshot_of(formation, loop_state(state, evaluation) | _identity(formation), alone=True)
    if formation.step == boundary.step:  # else the step was taken, and only its report failed
        content.shared["loaders"] = boundary.loaders
        boundary.put_buffers_back()
    if state.hooks.unreported is not None:
        info = {item.name: getattr(state.hooks.unreported, item.name) for item in dataclasses.fields(StepInfo)}
        info["loss_tensor"] = info["loss_tensor"].detach().cpu()
        content.shared["unreported"] = info
    content.shared["called"] = state.hooks.called
    for model in formation.models:  # gradients of the interrupted step are not part of the next one
        model.zero_grad(set_to_none=True)
    return RunState(formation.world_size, content, state.report.loss_log.unread(formation.step))


def kept(state: TrainState, evaluation: Evaluation) -> Snapshot:
    """Return the state at the boundary of a step, for the memory of other ranks; all ranks call this."""
    return snapshot_of(state.formation, loop_state(state, evaluation) | _identity(state.formation))


def _identity(formation: Formation) -> dict[str, Any]:
    return {"identity": {"run_id": formation.run_id, "lineage": formation.lineage}}


def load_kept(formation: Formation, content: Snapshot, where: str) -> dict[str, Any]:
    """Load a state that was kept in memory; return the loop's part of it, with its "path"."""
    shared = dict(content.shared)
    identity = shared.pop("identity")
    formation.run_id = formation.state_of = identity["run_id"]
    formation.lineage = identity["lineage"]
    if content.rank_state is not None:
        set_rng_state(content.rank_state)
    same_run = not formation.strategy.shards  # a rank of a sharded model has the names of its part alone
    rest = put_back(formation, content.tensors, content.step, shared, same_run=same_run)
    return {**rest, "path": f"{where} (step {content.step})"}


def restore(formation: Formation, state_here: RunState | None) -> dict[str, Any] | None:
    """Give all ranks the state of the furthest one; return the loop's part of it; None where no rank has a state."""
    steps = _gathered(formation, -1 if state_here is None else state_here.step)
    if max(steps) < 0:
        return None
    source = steps.index(max(steps))
    if state_here is not None:
        state_here.read_losses()
    # Ranks at the same step have equal tensors and keep them. An older or another state is kept until the new one is
    # here: a broadcast may break off.
    equal = state_here is not None and state_here.step == steps[source] and not formation.strategy.local_steps
    into = state_here.content.tensors if state_here is not None and (equal or formation.rank == source) else None
    plain = (
        None
        if state_here is None
        else (state_here.world_size, state_here.content.shared, state_here.content.rank_state, state_here.content.epoch)
    )
    before, shared, of_source, epoch = _broadcast(formation, plain, source)
    tensors = _share_tensors(formation, into, source)
    complete()
    random = (
        None if state_here is None else state_here.content.rank_state
    )  # a new rank begins with the numbers of its seed
    content = Snapshot(steps[source], epoch, tensors, random, shared)
    state = load_kept(formation, content, f"the memory of rank {source}")
    if formation.strategy.keeps_rank_state:  # a new rank gets what all ranks know, such as the number of steps
        factor = formation.world_size / before if random is not None else 0.0
        formation.strategy.load_rank_state([random if random is not None else of_source], factor)
    if before != formation.world_size:
        now = formation.world_size
        formation.notes.append(f"the ranks were {before} and are {now}: continuing after step {content.step}")
    return state


@dataclass(frozen=True)
class _TensorSpec:
    """Shape and dtype of a tensor that a rank allocates before it is broadcast."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorSpec:
        return cls(tensor.shape, tensor.dtype, tensor.device.type == "cpu")


def _share_tensors(formation: Formation, into: dict[str, Any] | None, source: int) -> dict[str, Any]:
    """Broadcast a rank's tree of tensors and plain values, into the tensors of `into` where it has such ones."""
    described = pytree.tree_map_only(torch.Tensor, _TensorSpec.of, into)
    described = _broadcast(formation, described, source)
    leaves, structure = pytree.tree_flatten(described)
    values_here, own_structure = pytree.tree_flatten(into)
    if own_structure != structure:
        values_here = [None] * len(leaves)
    values = [_share(formation, leaf, value, source) for leaf, value in zip(leaves, values_here, strict=True)]
    tree: dict[str, Any] = pytree.tree_unflatten(values, structure)
    return tree


def _share(formation: Formation, leaf: Any, value_here: Any, source: int) -> Any:
    """Return the source's value for a leaf of the tree."""
    if not isinstance(leaf, _TensorSpec):
        return leaf
    is_here = isinstance(value_here, torch.Tensor) and (formation.rank == source or _TensorSpec.of(value_here) == leaf)
    if is_here and formation.rank == source:
        value = value_here.detach().to(formation.device).contiguous()
    else:
        value = torch.empty(leaf.shape, dtype=leaf.dtype, device=formation.device)
    if formation.world_size > 1:
        dist.broadcast(value, src=source)
    if is_here:  # the same values: what is received is not used, because a broadcast that breaks off leaves anything
        return value_here.detach()
    return value.cpu() if leaf.on_host else value


def _broadcast(formation: Formation, content: Any, source: int) -> Any:
    box = [content if formation.rank == source else None]
    if formation.world_size > 1:
        dist.broadcast_object_list(box, src=source, device=formation.device)
    return box[0]


def _gathered(formation: Formation, number: int) -> list[int]:
    if formation.world_size == 1:
        return [number]
    places = [torch.zeros(1, dtype=torch.int64, device=formation.device) for _ in range(formation.world_size)]
    dist.all_gather(places, torch.tensor([number], dtype=torch.int64, device=formation.device))
    positions = [int(position) for position in places]
    raise_if_aborted()
    return positions
