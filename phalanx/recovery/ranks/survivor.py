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
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from phalanx.checkpoint.collectives import gather_to_all
from phalanx.errors import CheckpointError, CommunicationError
from phalanx.host.processes import STOPS
from phalanx.loop.checks import compare_ranks
from phalanx.loop.hooks import Callback
from phalanx.loop.run_state import RunState, StepBoundary, capture, restore
from phalanx.loop.step_info import StepInfo
from phalanx.loop.train_loop import TrainLoop
from phalanx.observe.events import Recovered
from phalanx.observe.history import History
from phalanx.recovery.messages import Position
from phalanx.recovery.ranks.gate import StepGate
from phalanx.recovery.ranks.member import Member, Regroup, without_frames
from phalanx.strategies.base import share_weights
from phalanx.world.abort import leave_groups, pop_recovery_seconds, raise_if_aborted
from phalanx.world.env import read_rank_env, stop_signals
from phalanx.world.groups import forget_groups
from phalanx.world.world import World

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation
    from phalanx.loop.reporting import Reporter
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.recovery.ranks.neighbours import Neighbours

_SAVE_SECONDS = 0.1
"""Grace period for an in-flight save after a loss; it completes only if the lost ranks had written their part."""

_POLL_SECONDS = 0.005


class Survivor:
    """The state of this process that is kept while the other ranks change."""

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        self.stop_requested: str | None = None
        """The signal that asked this process to stop between two loops; the next loop stops for it."""
        self._state: RunState | None = None
        self._boundary = StepBoundary()
        self._run_id = ""
        self._loop: TrainLoop | None = None
        self._trainable_before: dict[str, bool] = {}
        self._unfrozen: tuple[int, dict[str, bool]] = (-1, {})
        self.is_stale = False
        """Whether the objects of the task were trained, and their state is not in memory: they begin no run."""

    @property
    def step(self) -> int:
        """The last complete step, -1 where there is none."""
        return -1 if self._state is None else self._state.step

    def run(self, loop: TrainLoop, run_dir: Path) -> History:
        """Run the loop from the captured state; capture it again when ranks are lost or added."""
        self.run_dir = run_dir
        self._boundary = StepBoundary()
        loop.hooks.add(self._boundary)
        loop.hooks.add(_StartCallback(self._drop))
        strategy = loop.formation.strategy  # shards are kept with the losses; ranks that do not wait keep their own
        loop.report.loss_log.sums_per_step = (
            loop.formation.world_size > 1 and strategy.in_lockstep and not strategy.shards
        )
        self._loop = loop
        self.prepare(loop)
        if self.stop_requested is not None:
            loop.stop.ask(self.stop_requested)
        try:
            return loop.run()
        except BaseException as error:
            self._handle_interruption(loop, error)
            raise

    @contextmanager
    def returning(self, formation: Formation) -> Iterator[None]:
        """Capture the final state, too: ranks may be lost after the loop, while its result is gathered."""
        self._run_id = self._run_id or formation.run_id  # another group of this rank is not another run
        try:
            yield
        except BaseException as error:
            if self._loop is not None:
                self._handle_interruption(self._loop, error)
            raise
        if self._loop is not None:  # the group is left after this
            self._state = self._capture(self._loop, self._boundary)
            self._loop = None

    def _handle_interruption(self, loop: TrainLoop, error: BaseException) -> None:
        self._loop = None
        loop.formation.saver.release(_SAVE_SECONDS, ranks_lost=self.may_go_on(error))
        self.stop_requested = loop.stop.from_outside or self.stop_requested
        self._state = self._capture(loop, self._boundary)
        self.is_stale = self._state is None and loop.step > 0
        now = _trainable_flags(loop.task.model)
        flags = {name: flag for name, flag in now.items() if self._trainable_before.get(name, flag) != flag}
        self._unfrozen = (loop.step, flags)
        loop.report.interrupted()

    def _drop(self) -> None:
        """Release the captured state: the loop has it, and captures a newer one when it is interrupted."""
        self._state = None

    def _capture(self, loop: TrainLoop, boundary: StepBoundary) -> RunState | None:
        """Return the state of the last complete step; None where it was lost with other ranks."""
        try:
            return capture(loop.state, loop.evaluation, boundary) or self._state
        except (CommunicationError, OSError, EOFError) as error:
            loop.report.say(f"the state is not in memory any more: {error}", "warning")
            return None

    def match(self, formation: Formation, model: nn.Module) -> None:
        """Go on under the name of the run, with the parameters that it trains; before a model is prepared.

        All ranks call this. The name is that which ranks know that were there before: checkpoints and locks have it.
        """
        self._trainable_before = self._trainable_before or _trainable_flags(model)
        facts = gather_to_all((self.run_dir is not None, self._run_id, self._unfrozen))
        names = [name for began, name, _ in facts if began] or [facts[0][1]]
        self._run_id = formation.run_id = names[0]
        _, flags = max((unfrozen for _, _, unfrozen in facts), key=lambda unfrozen: unfrozen[0])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags.get(name, parameter.requires_grad))

    def may_go_on(self, error: BaseException) -> bool:
        """Whether an error only says that the ranks change, so that the others must not wait for this one."""
        return False

    def prepare(self, loop: TrainLoop) -> None:
        """Set how the loop restores its state, and what it does where all ranks stop."""

    def restore_or_resume(self, loop: TrainLoop) -> Callable[[], dict[str, Any] | None]:
        """Return what restores the state from memory where some rank has it, else from a checkpoint."""
        return lambda: restore(loop.formation, self._state) or self.resume(loop)

    def resume(self, loop: TrainLoop) -> dict[str, Any] | None:
        """Restore the last checkpoint of this run, else begin as the run did."""
        stale = any(gather_to_all(self.is_stale))
        state = loop.saving.restore()
        if state is None and stale:
            raise CheckpointError(
                "the state of the run was lost with its ranks, and there is no checkpoint to continue from",
                hint="Write checkpoint_frequency='100 steps', so that less is lost.",
            )
        if state is None and not loop.formation.strategy.shards:  # lost before the first step: all begin alike
            share_weights(loop.formation.unwrap(loop.model), always=True)
        return state

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


class ElasticSurvivor(Survivor):
    """A rank whose launcher replaces lost ranks in place."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self._member = member
        self._change: Position | None = None
        self._recovery: _ReportRecovery | None = None
        self._neighbours: Neighbours | None = None
        self._step_before = -1
        member.on_regroup = lambda why: self.ask(why, regroup=True)

    def may_go_on(self, error: BaseException) -> bool:
        """Whether an error only says that the ranks change."""
        return self._member.may_go_on(error)

    def move(self, why: str) -> None:
        """Wait for a place in the next group."""
        forget_groups()
        leave_groups()  # an exchange between neighbours that waits for a lost rank gets an error
        if self._neighbours is not None:
            self._neighbours.leave()
        reported = self._recovery is not None and self._recovery.reported
        self._recovery = None
        self._change = self._member.await_position(max(self.step, self._step_before), why, reported=reported)

    def prepare(self, loop: TrainLoop) -> None:
        """Restore from memory after a change, and leave for the next one at a step's boundary."""
        began = self.restore_or_resume(loop) if self._change is not None else loop.restore
        if loop.formation.strategy.shards and loop.formation.world_size > 1:
            began = self._with_neighbours(loop)

        def restore_and_join() -> dict[str, Any] | None:
            state = began()
            self._member.report_joined(loop.train_loader.sharded.fixed_ranks)
            return state

        loop.restore = restore_and_join
        if "nccl" in (loop.formation.world.comm_backend or ""):
            loop.formation.gradients.gate = StepGate(loop.formation.device)
        loop.reseed = loop.formation.reseed  # a step that is done again must draw the same numbers
        loop.control.before_stop = self._leave_if_regrouping
        if self._change is None:
            pop_recovery_seconds()  # the first group is start-up
        else:
            loop.state.regrouped = True
            self._recovery = _ReportRecovery(loop.report, self._change, max(self.step, self._step_before))
            loop.hooks.add(self._recovery)

    def _with_neighbours(self, loop: TrainLoop) -> Callable[[], dict[str, Any] | None]:
        """Keep shards in the memory of other ranks; return what restores them, else a checkpoint."""
        if self._neighbours is None:
            from phalanx.recovery.ranks.neighbours import Neighbours  # only sharded runs keep their state so

            self._neighbours = Neighbours(loop.config.memory_frequency)
        neighbours = self._neighbours
        neighbours.join(loop.formation)
        loop.hooks.add(neighbours)
        return lambda: neighbours.restore(loop.formation) or self.resume(loop)

    def _capture(self, loop: TrainLoop, boundary: StepBoundary) -> RunState | None:
        """Return the state of this rank; of a sharded model its neighbours keep it."""
        if self._neighbours is not None:
            self._step_before = loop.step
            return None
        gate = loop.formation.gradients.gate
        if gate is not None and gate.has_lost_state:
            loop.report.say("could not roll back the last step; copying the state of another rank", "warning")
            return None
        return super()._capture(loop, boundary)

    def _leave_if_regrouping(self) -> None:
        assert self._loop is not None, "called by the loop that runs"
        if self._loop.stop.regroups:
            self._loop.losses_checked()  # all ranks are here: none of these losses is lost
            _wait_for_all(self._loop.formation.world)
            raise Regroup(self._loop.stop.reason)


def _wait_for_all(world: World) -> None:
    """Wait, by the store, until all ranks are here: what nccl still sends to a slower one must not be ended."""
    if world.store is None:
        return
    present = world.store.add("regroup", 1)
    while present < world.world_size:
        raise_if_aborted()
        time.sleep(_POLL_SECONDS)
        present = world.store.add("regroup", 0)


def _trainable_flags(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


class _StartCallback(Callback):
    """Calls a function when the loop has its state and begins; after the callbacks of the user, which may raise."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Call it."""
        self._call()


class _ReportRecovery(Callback):
    """Reports a change of the group when the first step after it is complete, and has left all ranks equal."""

    def __init__(self, report: Reporter, change: Position, step_before: int) -> None:
        self._report, self._change = report, change
        self._before = step_before
        self._first = -1
        self.reported = False

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Note where the ranks go on."""
        self._first = trainer.step

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """Compare the ranks and report, once."""
        if info.step == self._first + 1:
            self._emit(trainer)
            compare_ranks(trainer.formation, trainer.model)

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """Report a change after the last step."""
        if trainer.step == self._first:
            self._emit(trainer)

    def _emit(self, trainer: RunningTrainer) -> None:
        self.reported = True
        self._report.recovered(
            Recovered(
                step=self._first,
                lost_steps=max(0, self._before - self._first),
                seconds=time.time() - self._change.began,
                reason=self._change.reason,
                world_size=trainer.formation.world_size,
                lost=list(self._change.lost),
                parts=pop_recovery_seconds(),
            )
        )


Result = TypeVar("Result")


def run_recovering(run_once: Callable[[Survivor], Result], get_ready: Callable[[], None]) -> Result:
    """Run, and after lost or added ranks run again with those present, until a run succeeds or fails by itself.

    `get_ready` does what a rank that replaces a lost one can do while the others still leave their groups.
    """
    member = Member.from_environment()
    survivor = ElasticSurvivor(member)
    with survivor.listening():
        if member.joins_late:
            get_ready()
            survivor.move("new")
        while True:
            try:
                return run_once(survivor)
            except Exception as error:
                if not member.may_go_on(error):
                    raise
                why, at_boundary = without_frames(error), isinstance(error, Regroup)
            if not at_boundary:
                member.await_release(why)
            gc.collect()  # a model in a cycle would hold the process group
            survivor.move(why)
