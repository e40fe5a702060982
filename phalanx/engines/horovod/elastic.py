"""Elastic Horovod: state kept in memory, restored after a rank is lost or added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx.engines.horovod.rendezvous import horovod, note_new_rank
from phalanx.host.lost_peers import lost_peers
from phalanx.loop.train_loop import TrainLoop
from phalanx.recovery import Survivor
from phalanx.world.env import read_rank_env

Result = TypeVar("Result")


class HorovodSurvivor(Survivor):
    """A rank of elastic Horovod, whose driver tells which nodes there are."""

    def __init__(self, attempt: int) -> None:
        super().__init__()
        self.attempt = attempt
        self.hosts_changed = False

    def prepare(self, loop: TrainLoop) -> None:
        """Restore from memory after the first attempt, and stop where nodes were lost or added."""
        if self.attempt > 0:
            loop.restore = self.restore_or_resume(loop)
        loop.control.before_stop = self._regroup_if_hosts_changed
        if self.hosts_changed:  # during the rendezvous
            self.note_host_change()

    def note_host_change(self) -> None:
        """Let all ranks stop at a step boundary for a new rendezvous; called by a thread of Horovod."""
        self.hosts_changed = True
        self.ask("a change of nodes")

    def _regroup_if_hosts_changed(self) -> None:
        """Leave the loop for a new rendezvous, unless rank 0 was asked to end the run; called where all ranks stop."""
        from horovod.common.exceptions import HostsUpdatedInterrupt

        assert self._loop is not None, "called by the loop that runs"
        reason = self._loop.stop.from_outside or self.stop_requested
        reason, changed = horovod().broadcast_object((reason, self.hosts_changed), root_rank=0, name="phalanx.why_stop")
        if reason is not None:
            self._loop.stop.reason = reason
        elif changed:
            raise HostsUpdatedInterrupt(skip_sync=False)


def run_elastic(run_once: Callable[[HorovodSurvivor], Result]) -> Result:
    """Run, and after lost or added ranks run again with those present, until a run succeeds or fails by itself."""
    hvd = horovod()
    import horovod.torch.elastic as elastic
    from horovod.common.exceptions import HorovodInternalError

    env = read_rank_env()
    survivor = HorovodSurvivor(0 if env is None else env.attempt)

    def attempt(state: Any) -> Result:
        note_new_rank(survivor.attempt)
        try:
            return run_once(survivor)
        except BaseException as error:
            if dist.is_initialized():  # close connections: a rank that waits in a collective then gets an error
                dist.destroy_process_group()
            if not isinstance(error, HorovodInternalError) and lost_peers(error):
                raise HorovodInternalError(str(error)) from error
            raise

    with survivor.listening():
        result: Result = elastic.run(attempt)(_state_class()(hvd, survivor))
    return result


def _state_class() -> type:
    """Return a subclass of Horovod's State for the survivor, which holds the state itself."""
    from horovod.common.elastic import State

    class SurvivorState(State):  # type: ignore[misc]
        def __init__(self, hvd: Any, survivor: HorovodSurvivor) -> None:
            super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
            self._survivor = survivor

        def on_hosts_updated(self, timestamp: int, update: Any) -> None:
            self._survivor.note_host_change()

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
