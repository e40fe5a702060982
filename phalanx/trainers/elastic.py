"""Elastic Horovod: ranks that are left go on in memory when others are lost, and newcomers get rank 0's state."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from phalanx.launch.blame import says_lost_peer
from phalanx.loop.carrying import Carried, Position, carry, take_over
from phalanx.world.env import read_rank_env, stop_signals
from phalanx.world.horovod import horovod, note_new_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

    from phalanx.loop.trainer import TrainLoop
    from phalanx.observe.history import History

Result = TypeVar("Result")


class Survivor:
    """What lives on in this process while the ranks around it change."""

    def __init__(self, attempt: int) -> None:
        self.run_dir: Path | None = None
        self.attempt = attempt
        self.hosts_changed = False
        self.told_to_stop: str | None = None
        """What told this process to stop while ranks were meeting, or before they met again: the next loop obeys."""
        self._carried: Carried | None = None
        self._loop: TrainLoop | None = None

    def run(self, loop: TrainLoop, run_dir: Path) -> History:
        """Run the loop from what was carried here; keep its state when ranks are lost or come."""
        self.run_dir = run_dir
        position = Position()
        loop.hooks.add(position)
        if self.attempt > 0:
            loop.restore = lambda: take_over(loop.formation, self._carried) or loop.saving.restore()
        loop.before_stop = self._regroup_if_hosts_changed
        self._loop = loop
        if self.hosts_changed:  # while the ranks were still meeting
            self.hear_of_hosts()
        if self.told_to_stop is not None:
            loop.stop.ask(self.told_to_stop)
        try:
            return loop.run()
        except BaseException:
            self.told_to_stop = loop.stop.told or self.told_to_stop
            self._carried = carry(loop, position) or self._carried
            raise
        finally:
            self._loop = None

    def hear_of_hosts(self) -> None:
        """Have all ranks stop at a boundary, to meet again with other machines; told by a thread of Horovod's."""
        self.hosts_changed = True
        if self._loop is not None:
            self._loop.stop.ask("a change of machines")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of SIGTERM between the loops too, which listen for themselves while they run."""

        def hear(number: int, frame: FrameType | None) -> None:
            self.told_to_stop = signal.Signals(number).name
            if self._loop is not None:
                self._loop.stop.ask(self.told_to_stop)

        in_main = threading.current_thread() is threading.main_thread()  # Python allows handlers in no other
        before = {number: signal.signal(number, hear) for number in stop_signals(read_rank_env()) if in_main}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _regroup_if_hosts_changed(self) -> None:
        """At a boundary where all ranks stop: to meet again, unless rank 0 was told to end the run."""
        from horovod.common.exceptions import HostsUpdatedInterrupt

        assert self._loop is not None, "called by the loop that runs"
        told = self._loop.stop.told or self.told_to_stop
        told, changed = horovod().broadcast_object((told, self.hosts_changed), root_rank=0, name="phalanx.why_stop")
        if told is not None:
            self._loop.stop.reason = told
        elif changed:
            raise HostsUpdatedInterrupt(skip_sync=False)


def run_elastic(run_once: Callable[[Survivor], Result]) -> Result:
    """Run, and run on with whoever is there, until a run ends well or by an error of its own."""
    hvd = horovod()
    import horovod.torch.elastic as elastic
    from horovod.common.exceptions import HorovodInternalError

    env = read_rank_env()
    survivor = Survivor(0 if env is None else env.attempt)

    def attempt(state: Any) -> Result:
        note_new_place(survivor.attempt)
        try:
            return run_once(survivor)
        except BaseException as error:
            _leave_old_group()
            if not isinstance(error, HorovodInternalError) and _lost_peers(error):
                raise HorovodInternalError(str(error)) from error
            raise

    with survivor.listening():
        result: Result = elastic.run(attempt)(_state_class()(hvd, survivor))
    return result


def _state_class() -> type:
    """Return what Horovod asks about state, which it must see as its own class: ours travels with the survivor."""
    from horovod.common.elastic import State

    class SurvivorState(State):  # type: ignore[misc]
        def __init__(self, hvd: Any, survivor: Survivor) -> None:
            super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
            self._survivor = survivor

        def on_hosts_updated(self, timestamp: int, update: Any) -> None:
            self._survivor.hear_of_hosts()

        def reset(self) -> None:
            self._survivor.attempt += 1
            self._survivor.hosts_changed = False

        def sync(self) -> None:
            self._survivor.attempt = self._bcast_object(self._survivor.attempt, name="phalanx.attempt")

        def save(self) -> None:
            """Nothing: between steps the state is whole as it lies."""

        def restore(self) -> None:
            """Nothing: a step that broke off has changed nothing."""

    return SurvivorState


def _lost_peers(error: BaseException) -> bool:
    """Whether an error says that other ranks are gone, itself or in what led to it."""
    seen: BaseException | None = error
    while seen is not None:
        if says_lost_peer(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _leave_old_group() -> None:
    """Close torch's connections: a rank that waits for us in one of its collectives then hears that we left."""
    if dist.is_initialized():
        dist.destroy_process_group()
