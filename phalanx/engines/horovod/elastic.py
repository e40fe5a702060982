"""Elastic Horovod: state kept in memory, restored after a rank is lost or added."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx.engines.horovod.rendezvous import horovod, note_new_rank
from phalanx.launch.failure import reports_lost_peer
from phalanx.loop.formation import Formation
from phalanx.loop.hooks import Callback, StepInfo
from phalanx.loop.state import put_back, shared_state, tensors_of
from phalanx.loop.trainer import TrainLoop
from phalanx.observe.history import History
from phalanx.torch_compat import pytree
from phalanx.world.env import read_rank_env, stop_signals


@dataclass(frozen=True)
class MemoryState:
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


def capture(loop: TrainLoop, position: Position) -> MemoryState | None:
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
    return MemoryState(formation.step, formation.run_id, formation.lineage, formation.world_size, tensors, shared)


def restore(formation: Formation, captured: MemoryState | None) -> dict[str, Any] | None:
    """Broadcast the state that rank 0 holds; return what is not part of a `Prepared`, None where rank 0 has none."""
    identity = None if captured is None else (captured.step, captured.run_id, captured.lineage, captured.world_size)
    shown = _broadcast(formation, identity)
    if shown is None:
        return None
    step, formation.run_id, formation.lineage, before = shown
    tensors = _share_tensors(formation, None if captured is None else captured.tensors)
    shared = _broadcast(formation, None if captured is None else captured.shared)
    formation.notes.append(f"the ranks were {before} and are {formation.world_size}: continuing after step {step}")
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
    described = _broadcast(
        formation,
        pytree.tree_map_only(torch.Tensor, lambda one: _Described(one.shape, one.dtype, one.device.type == "cpu"), own),
    )
    leaves, structure = pytree.tree_flatten(described)
    held = leaves if own is None else pytree.tree_leaves(own)
    values = [_share(formation, leaf, value) for leaf, value in zip(leaves, held, strict=True)]
    tree: dict[str, Any] = pytree.tree_unflatten(values, structure)
    return tree


def _share(formation: Formation, leaf: Any, held: Any) -> Any:
    """Return rank 0's value for a leaf of the tree."""
    if not isinstance(leaf, _Described):
        return leaf
    if isinstance(held, torch.Tensor):
        value = held.detach().to(formation.device, copy=True)
    else:
        value = torch.empty(leaf.shape, dtype=leaf.dtype, device=formation.device)
    if formation.world_size > 1:
        dist.broadcast(value, src=0)
    return value.cpu() if leaf.on_host else value


def _broadcast(formation: Formation, what: Any) -> Any:
    box = [what if formation.is_main else None]
    if formation.world_size > 1:
        dist.broadcast_object_list(box, src=0, device=formation.device)
    return box[0]


Result = TypeVar("Result")


class Survivor:
    """The state of this process that is kept while the other ranks change."""

    def __init__(self, attempt: int) -> None:
        self.run_dir: Path | None = None
        self.attempt = attempt
        self.hosts_changed = False
        self.stop_requested: str | None = None
        """The signal that asked this process to stop during a rendezvous or before it; the next loop stops for it."""
        self._captured: MemoryState | None = None
        self._loop: TrainLoop | None = None

    def run(self, loop: TrainLoop, run_dir: Path) -> History:
        """Run the loop from the captured state; capture it again when ranks are lost or added."""
        self.run_dir = run_dir
        position = Position()
        loop.hooks.add(position)
        if self.attempt > 0:
            loop.restore = lambda: restore(loop.formation, self._captured) or loop.saving.restore()
        loop.before_stop = self._regroup_if_hosts_changed
        self._loop = loop
        if self.hosts_changed:  # during the rendezvous
            self.take_host_change()
        if self.stop_requested is not None:
            loop.stop.ask(self.stop_requested)
        try:
            return loop.run()
        except BaseException:
            self.stop_requested = loop.stop.from_outside or self.stop_requested
            self._captured = capture(loop, position) or self._captured
            raise
        finally:
            self._loop = None

    def take_host_change(self) -> None:
        """Let all ranks stop at a step boundary for a new rendezvous; called by a thread of Horovod."""
        self.hosts_changed = True
        if self._loop is not None:
            self._loop.stop.ask("a change of machines")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle stop signals between the loops too; a running loop has its own handlers."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.stop_requested = signal.Signals(number).name
            if self._loop is not None:
                self._loop.stop.ask(self.stop_requested)

        in_main = threading.current_thread() is threading.main_thread()  # Python allows handlers in no other
        before = {number: signal.signal(number, handle) for number in stop_signals(read_rank_env()) if in_main}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _regroup_if_hosts_changed(self) -> None:
        """Leave the loop for a new rendezvous, unless rank 0 was asked to end the run; called where all ranks stop."""
        from horovod.common.exceptions import HostsUpdatedInterrupt

        assert self._loop is not None, "called by the loop that runs"
        asked = self._loop.stop.from_outside or self.stop_requested
        asked, changed = horovod().broadcast_object((asked, self.hosts_changed), root_rank=0, name="phalanx.why_stop")
        if asked is not None:
            self._loop.stop.reason = asked
        elif changed:
            raise HostsUpdatedInterrupt(skip_sync=False)


def run_elastic(run_once: Callable[[Survivor], Result]) -> Result:
    """Run, and after lost or added ranks run again with those present, until a run succeeds or fails by itself."""
    hvd = horovod()
    import horovod.torch.elastic as elastic
    from horovod.common.exceptions import HorovodInternalError

    env = read_rank_env()
    survivor = Survivor(0 if env is None else env.attempt)

    def attempt(state: Any) -> Result:
        note_new_rank(survivor.attempt)
        try:
            return run_once(survivor)
        except BaseException as error:
            if dist.is_initialized():  # close connections: a rank that waits in a collective then gets an error
                dist.destroy_process_group()
            if not isinstance(error, HorovodInternalError) and _lost_peers(error):
                raise HorovodInternalError(str(error)) from error
            raise

    with survivor.listening():
        result: Result = elastic.run(attempt)(_state_class()(hvd, survivor))
    return result


def _state_class() -> type:
    """Return a subclass of Horovod's State for the survivor, which holds the state itself."""
    from horovod.common.elastic import State

    class SurvivorState(State):  # type: ignore[misc]
        def __init__(self, hvd: Any, survivor: Survivor) -> None:
            super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
            self._survivor = survivor

        def on_hosts_updated(self, timestamp: int, update: Any) -> None:
            self._survivor.take_host_change()

        def reset(self) -> None:
            self._survivor.attempt += 1
            self._survivor.hosts_changed = False

        def sync(self) -> None:
            self._survivor.attempt = self._bcast_object(self._survivor.attempt, name="phalanx.attempt")

        def save(self) -> None:
            """Do nothing: between steps the state is complete."""

        def restore(self) -> None:
            """Do nothing: an interrupted step has changed nothing."""

    return SurvivorState


def _lost_peers(error: BaseException) -> bool:
    """Whether an error, or an error that led to it, says that other ranks were lost."""
    seen: BaseException | None = error
    while seen is not None:
        if reports_lost_peer(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
