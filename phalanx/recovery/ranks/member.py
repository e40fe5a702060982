"""A rank's connection to the launcher, which decides which processes are ranks while they run.

The launcher's end, with the states of the group, is `phalanx.recovery.launcher`. A thread reads the control socket, so
that an abort reaches a rank that waits in a collective.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from phalanx import torch_compat
from phalanx.errors import error_line
from phalanx.host import messages
from phalanx.host.lost_peers import lost_peers
from phalanx.host.processes import JOINS_LATE
from phalanx.host.wire import Wire, decode, encode
from phalanx.observe.heartbeat import BusyBeat
from phalanx.recovery.messages import (
    Abort,
    End,
    LeaveAtStep,
    Position,
    RankAborted,
    RankInterrupted,
    RankJoined,
    RankReady,
    Release,
)
from phalanx.torch_compat import has_backend
from phalanx.world.abort import abort_collectives, begin_group, end_nccl, watch_groups


class Regroup(Exception):
    """The ranks go on with others."""


def export(position: Position) -> None:
    """Set the environment variables of a new place."""
    os.environ.update(
        RANK=str(position.rank),
        LOCAL_RANK=str(position.local_rank),
        WORLD_SIZE=str(position.world_size),
        LOCAL_WORLD_SIZE=str(position.local_world_size),
        ROLE_RANK=str(position.rank),
        ROLE_WORLD_SIZE=str(position.world_size),
        GROUP_RANK=str(position.node_rank),
        PHALANX_TERM=str(position.term),
        PHALANX_GENERATION=str(position.generation),
        PHALANX_FAILURES=str(position.failures),
    )
    if position.master_addr:
        os.environ.update(MASTER_ADDR=position.master_addr, MASTER_PORT=str(position.master_port))


class Member:
    """This process among those that form the group."""

    def __init__(self, control: int) -> None:
        self._control = socket.socket(fileno=control)
        self._positions: queue.SimpleQueue[Position | None] = queue.SimpleQueue()
        self._why: str | None = None
        self._release_event = threading.Event()
        """Whether all ranks have aborted, so that collectives over nccl may be ended."""
        self._generation = int(os.environ.get("PHALANX_GENERATION", "0"))
        self.on_regroup: Callable[[str], None] | None = None
        """Called by the thread when all ranks have to leave at a step's boundary."""
        self._forming = BusyBeat()
        self.joins_late = os.environ.get(JOINS_LATE) == "1"
        watch_groups()
        threading.Thread(target=self._listen, name="phalanx-member", daemon=True).start()

    @classmethod
    def from_environment(cls) -> Member:
        """Return the member of a rank whose launcher replaces lost ranks; once per process."""
        return cls(int(os.environ.pop("PHALANX_CONTROL_FD")))

    def _listen(self) -> None:
        while (message := messages.receive(self._control)) is not None:
            order = decode(message[0])
            if isinstance(order, Abort):
                self._release_event.clear()
                self._why = order.why
                abort_collectives(order.why)
                self._try_to_send(RankAborted())
            elif isinstance(order, Release):
                self._release()
            elif isinstance(order, LeaveAtStep) and self.on_regroup is not None:
                self.on_regroup(order.why)
            elif isinstance(order, Position):
                self._release_event.clear()
                self._why = None  # here, and not where the position is read: an abort may follow at once
                begin_group()
                self._positions.put(order)
            elif isinstance(order, End):
                self._release()
                self._positions.put(None)
        self._release()
        self._positions.put(None)  # the launcher has ended

    def _send(self, message: Wire) -> None:
        messages.send(self._control, encode(message))

    def _try_to_send(self, message: Wire) -> None:
        with contextlib.suppress(OSError):  # the launcher has ended
            self._send(message)

    def _release(self) -> None:
        if self._why is not None:  # else this rank trains
            end_nccl()
        self._release_event.set()

    def await_release(self, why: str) -> None:
        """Wait until nccl's collectives may be ended: when all ranks have aborted, also those that noticed no loss."""
        if has_backend("nccl"):
            self._try_to_send(RankInterrupted(why))
            self._forming.begin()  # it does not hang: another rank may have to be killed before this one is released
            self._release_event.wait()
            self._forming.end()

    def may_go_on(self, error: BaseException) -> bool:
        """Whether an error only says that other ranks were lost, or that the group changes."""
        if isinstance(error, torch.AcceleratorError):  # the GPU does not work for this process any more
            return False
        return isinstance(error, Regroup) or self._why is not None or lost_peers(error)

    def await_position(self, step: int, why: str, *, reported: bool = False) -> Position:
        """Report the last complete step of a rank that has left its groups, and wait for a place in the next one.

        `reported`: whether its group has reported why it was formed.
        """
        self._forming.end()
        self._send(RankReady(why, step, reported))
        position = self._positions.get()
        if position is None:  # the run is over, and this rank was not needed, or it has failed for another reason
            raise SystemExit(0)
        export(position)
        self._generation = position.generation
        self._forming.begin()  # a large model takes long to build
        return position

    def report_joined(self, fixed: str = "") -> None:
        """Report that this rank is in the group and has the state; `fixed`: why the number of ranks cannot change."""
        self._forming.end()
        _beat_during_compiles()
        self._send(RankJoined(self._generation, fixed))


@functools.cache
def _beat_during_compiles() -> None:
    """Let a rank that compiles, which may take minutes, count as one that makes progress; once per process."""
    compiling = BusyBeat()
    torch_compat.around_compiles(compiling.begin, compiling.end)


def without_frames(error: BaseException) -> str:
    """Return an error's text, and release what its frames hold: models, and through them process groups."""
    text = error_line(type(error).__name__, str(error))
    link: Any = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return text
