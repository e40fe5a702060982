"""Go on in memory after ranks were lost or added: what a surviving rank keeps, and how all ranks get the same state.

A step is a transaction: weights change only in the optimizer's step, after the last collective. So a rank that an error
interrupts holds the complete state of its last step. Ranks may differ by one step; the furthest one's state counts.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx.errors import CommunicationError
from phalanx.host.signals import STOPS
from phalanx.loop.formation import Formation
from phalanx.loop.hooks import Callback, StepInfo
from phalanx.loop.neighbours import Neighbours
from phalanx.loop.state import put_back, shared_state, tensors_of
from phalanx.loop.trainer import TrainLoop
from phalanx.observe.events import Recovered
from phalanx.observe.history import History
from phalanx.torch_compat import foreach_copy_, pytree
from phalanx.world import membership
from phalanx.world.abort import leave_groups
from phalanx.world.env import read_rank_env, stop_signals

_SAVE_SECONDS = 0.1
"""How long a save in flight may take when ranks were lost: only where they had written their part it is complete."""
_AVERAGE = "average"
"""The entry for the averaged weights (ema_decay)."""


@dataclass(frozen=True)
class MemoryState:
    """What a surviving rank knows of the run."""

    step: int
    run_id: str
    lineage: list[dict[str, Any]]
    world_size: int
    tensors: dict[str, Any]
    shared: dict[str, Any]
    rank_state: dict[str, Any]
    """What only this rank has, such as the residuals of a compressor."""


class Committed(Callback):
    """Notes after each step what an interrupted step changes: how far the data were read, and the buffers."""

    def __init__(self) -> None:
        self.step = -1
        self.loaders: list[dict[str, Any]] = []
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def on_fit_start(self, trainer: TrainLoop) -> None:
        """Note where the run begins or resumes."""
        self._buffers = [buffer for model in trainer.formation.models for buffer in model.buffers()]
        self._copies = [buffer.clone() for buffer in self._buffers]
        self._note(trainer.formation)

    def on_step_end(self, trainer: TrainLoop, info: StepInfo) -> None:
        """Note what this step has read."""
        self._note(trainer.formation)

    def on_epoch_end(self, trainer: TrainLoop, epoch: int, metrics: dict[str, float]) -> None:
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


def capture(loop: TrainLoop, committed: Committed) -> MemoryState | None:
    """Return the state after the last complete step; None before the run has begun. Without communication."""
    formation = loop.formation
    if committed.step < 0:
        return None
    shared = {**shared_state(formation), **loop.to_keep()}
    if formation.step == committed.step:  # else the step was taken, and only its report failed
        shared["loaders"] = committed.loaders
        committed.put_buffers_back()
    tensors = tensors_of(formation, alone=True)
    if formation.average is not None:
        tensors[_AVERAGE] = formation.average.other
    rank_state = formation.strategy.rank_state() if formation.strategy.keeps_rank_state else {}
    for model in formation.models:  # gradients of the interrupted step are not part of the next one
        model.zero_grad(set_to_none=True)
    identity = (formation.step, formation.run_id, formation.lineage, formation.world_size)
    return MemoryState(*identity, tensors, shared, rank_state)


def restore(formation: Formation, captured: MemoryState | None) -> dict[str, Any] | None:
    """Give all ranks the state of the furthest one; return what is not part of a `Prepared`; None without one."""
    steps = [-1 if captured is None else captured.step]
    if formation.world_size > 1:
        gathered = [torch.zeros(1, dtype=torch.int64, device=formation.device) for _ in range(formation.world_size)]
        dist.all_gather(gathered, torch.tensor(steps, dtype=torch.int64, device=formation.device))
        steps = [int(one) for one in gathered]
    if max(steps) < 0:
        return None
    source = steps.index(max(steps))
    identity = None if captured is None else (captured.step, captured.run_id, captured.lineage, captured.world_size)
    step, formation.run_id, formation.lineage, before = _broadcast(formation, identity, source)
    tensors = _share_tensors(formation, None if captured is None else captured.tensors, source)
    shared, of_source = _broadcast(
        formation, None if captured is None else (captured.shared, captured.rank_state), source
    )
    _load_average(formation, tensors.pop(_AVERAGE, None))
    if of_source:  # a new rank has nothing of its own: it gets what all ranks know, such as the number of steps
        own = captured.rank_state if captured is not None else None
        factor = formation.world_size / before if own is not None else 0.0
        formation.strategy.load_rank_state([own if own is not None else of_source], factor)
    if before != formation.world_size:
        formation.notes.append(f"the ranks were {before} and are {formation.world_size}: continuing after step {step}")
    return {**put_back(formation, tensors, step, dict(shared)), "path": f"the memory of rank {source} (step {step})"}


def _load_average(formation: Formation, saved: dict[str, torch.Tensor] | None) -> None:
    if formation.average is not None and saved is not None:
        with torch.no_grad():
            for name, held in formation.average.other.items():
                held.copy_(saved[name])


@dataclass(frozen=True)
class _Described:
    """Shape and dtype of a tensor that a rank allocates before it is broadcast."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool


def _share_tensors(formation: Formation, own: dict[str, Any] | None, source: int) -> dict[str, Any]:
    """Broadcast a rank's tree of tensors and plain values; trees of new ranks may have another structure."""
    own = own if formation.rank == source else None
    described = _broadcast(
        formation,
        pytree.tree_map_only(torch.Tensor, lambda one: _Described(one.shape, one.dtype, one.device.type == "cpu"), own),
        source,
    )
    leaves, structure = pytree.tree_flatten(described)
    held = leaves if own is None else pytree.tree_leaves(own)
    values = [_share(formation, leaf, value, source) for leaf, value in zip(leaves, held, strict=True)]
    tree: dict[str, Any] = pytree.tree_unflatten(values, structure)
    return tree


def _share(formation: Formation, leaf: Any, held: Any, source: int) -> Any:
    """Return the source's value for a leaf of the tree."""
    if not isinstance(leaf, _Described):
        return leaf
    if isinstance(held, torch.Tensor):
        value = held.detach().to(formation.device, copy=True)
    else:
        value = torch.empty(leaf.shape, dtype=leaf.dtype, device=formation.device)
    if formation.world_size > 1:
        dist.broadcast(value, src=source)
    return value.cpu() if leaf.on_host else value


def _broadcast(formation: Formation, what: Any, source: int) -> Any:
    box = [what if formation.rank == source else None]
    if formation.world_size > 1:
        dist.broadcast_object_list(box, src=source, device=formation.device)
    return box[0]


class Survivor:
    """The state of this process that is kept while the other ranks change."""

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        self.stop_requested: str | None = None
        """The signal that asked this process to stop between two loops; the next loop stops for it."""
        self._captured: MemoryState | None = None
        self._run_id = ""
        self._loop: TrainLoop | None = None

    @property
    def step(self) -> int:
        """The last complete step, -1 where there is none."""
        return -1 if self._captured is None else self._captured.step

    def run(self, loop: TrainLoop, run_dir: Path) -> History:
        """Run the loop from the captured state; capture it again when ranks are lost or added."""
        self.run_dir = run_dir
        committed = Committed()
        loop.hooks.add(committed)
        self._loop = loop
        self.prepare(loop)
        if self.stop_requested is not None:
            loop.stop.ask(self.stop_requested)
        try:
            return loop.run()
        except BaseException as error:
            self._run_id = loop.formation.run_id
            loop.formation.saver.release(_SAVE_SECONDS, ranks_lost=self.may_go_on(error))
            self.stop_requested = loop.stop.from_outside or self.stop_requested
            self._captured = self._capture(loop, committed)
            loop.report.interrupted()
            raise
        finally:
            self._loop = None

    def _capture(self, loop: TrainLoop, committed: Committed) -> MemoryState | None:
        """Return the state of the last complete step; None where it was lost with other ranks."""
        try:
            return capture(loop, committed) or self._captured
        except (CommunicationError, OSError, EOFError) as error:
            loop.report.say(f"the state is not in memory any more: {error}", "warning")
            return None

    def may_go_on(self, error: BaseException) -> bool:
        """Whether an error only says that the ranks change, so that the others must not wait for this one."""
        return False

    def prepare(self, loop: TrainLoop) -> None:
        """Set how the loop restores its state, and what it does where all ranks stop."""

    def restore_or_resume(self, loop: TrainLoop) -> Callable[[], dict[str, Any] | None]:
        """Return what restores the state from memory where some rank has it, else from a checkpoint."""
        return lambda: restore(loop.formation, self._captured) or self.resume(loop)

    def resume(self, loop: TrainLoop) -> dict[str, Any] | None:
        """Restore the last checkpoint of this run: its name is what the ranks that were there before know."""
        names: list[Any] = [self._run_id] * loop.formation.world_size
        if loop.formation.world_size > 1:
            dist.all_gather_object(names, self._run_id)
        loop.formation.run_id = next((name for name in names if name), loop.formation.run_id)
        return loop.saving.restore()

    def ask(self, reason: str, *, regroup: bool = False) -> None:
        """Let the running loop stop at a step's boundary; called by other threads."""
        loop = self._loop
        if loop is not None:
            loop.stop.ask(reason, regroup=regroup)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle stop signals between the loops too; a running loop has its own handlers."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.stop_requested = signal.Signals(number).name
            self.ask(self.stop_requested)

        in_main = threading.current_thread() is threading.main_thread()  # Python allows handlers in no other
        before = {number: signal.signal(number, handle) for number in stop_signals(read_rank_env()) if in_main}
        if in_main:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # what came since this rank was forked
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Recovering(Survivor):
    """A rank whose launcher replaces lost ranks in place."""

    def __init__(self, member: membership.Member) -> None:
        super().__init__()
        self._member = member
        self._change: membership.Position | None = None
        self._neighbours: Neighbours | None = None
        self._step_before = -1
        member.on_regroup = lambda why: self.ask(why, regroup=True)

    def may_go_on(self, error: BaseException) -> bool:
        """Whether an error only says that the ranks change."""
        return self._member.may_go_on(error)

    def move(self, why: str) -> None:
        """Wait for a place in the next group."""
        leave_groups()  # an exchange between neighbours that waits for a lost rank gets an error
        if self._neighbours is not None:
            self._neighbours.leave()
        self._change = self._member.await_position(max(self.step, self._step_before), why)

    def prepare(self, loop: TrainLoop) -> None:
        """Restore from memory after a change, and leave for the next one at a step's boundary."""
        began = self.restore_or_resume(loop) if self._change is not None else loop.restore
        if loop.formation.strategy.shards and loop.formation.world_size > 1:
            began = self._with_neighbours(loop)

        def restore_and_join() -> dict[str, Any] | None:
            state = began()
            self._member.joined(loop.train_loader.sharded.fixed_ranks)
            return state

        loop.restore = restore_and_join
        loop.reseed = loop.formation.reseed  # a step that is done again must draw the same numbers
        loop.before_stop = self._leave_if_regrouping
        if self._change is not None:
            loop.continues = True
            loop.hooks.add(_ReportRecovery(self._change, max(self.step, self._step_before)))

    def _with_neighbours(self, loop: TrainLoop) -> Callable[[], dict[str, Any] | None]:
        """Keep shards in the memory of other ranks; return what restores them, else a checkpoint."""
        if self._neighbours is None:
            self._neighbours = Neighbours(loop.config.memory_frequency)
        neighbours = self._neighbours
        neighbours.join(loop.formation)
        loop.hooks.add(neighbours)
        return lambda: neighbours.restore(loop.formation) or self.resume(loop)

    def _capture(self, loop: TrainLoop, committed: Committed) -> MemoryState | None:
        """Return the state of this rank; of a sharded model its neighbours keep it."""
        if self._neighbours is None:
            return super()._capture(loop, committed)
        self._step_before = loop.step
        return None

    def _leave_if_regrouping(self) -> None:
        assert self._loop is not None, "called by the loop that runs"
        if self._loop.stop.regroups:
            raise membership.Regroup(self._loop.stop.reason)


class _ReportRecovery(Callback):
    """Reports a change of the group when the first step after it is complete."""

    def __init__(self, change: membership.Position, step_before: int) -> None:
        self._change = change
        self._before = step_before
        self._first = -1

    def on_fit_start(self, trainer: TrainLoop) -> None:
        """Note where the ranks go on."""
        self._first = trainer.step

    def on_step_end(self, trainer: TrainLoop, info: StepInfo) -> None:
        """Report, once."""
        if info.step != self._first + 1:
            return
        lost = max(0, self._before - self._first)
        trainer.report.recovered(
            Recovered(
                step=self._first,
                lost_steps=lost,
                seconds=time.time() - self._change.began,
                reason=self._change.reason,
                world_size=trainer.formation.world_size,
                lost=self._change.lost,
            )
        )


Result = TypeVar("Result")


def run_recovering(member: membership.Member, run_once: Callable[[Survivor], Result]) -> Result:
    """Run, and after lost or added ranks run again with those present, until a run succeeds or fails by itself."""
    survivor = Recovering(member)
    with survivor.listening():
        if member.joins_late:
            survivor.move("new")
        while True:
            try:
                return run_once(survivor)
            except Exception as error:
                if not member.may_go_on(error):
                    raise
                why = membership.without_frames(error)
            gc.collect()  # a model in a cycle would hold the process group
            survivor.move(why)
