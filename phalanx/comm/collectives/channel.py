"""Point-to-point messages between the ranks of a group, and counts of what was sent.

All collectives of Phalanx are written with `send` and `receive`, so that their code shows every byte that they move.
Messages between two ranks arrive in the order in which they were sent; a channel is used by one thread.

Before data, ranks compare what they are about to do (`mismatch`). On gloo they do not wait for the result: data has a
tag computed from the description, so that it only reaches a rank that does the same, and the result is read when data
is first waited for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from phalanx.errors import CommunicationError, first_line
from phalanx.observe.call_ring import GroupCalls

_THREAD_NAME = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")


CHUNK_BYTES = 4 << 20
"""Large tensors are sent in chunks of this size. Smaller ones overlap better, but gloo wakes two threads for each."""

DEPTH = 8
"""Receives that are posted ahead on gloo: data then flows as soon as it is sent."""


def lower_network_threads() -> None:
    """Give gloo's network threads of this process the policy SCHED_BATCH, where /proc exists.

    gloo's thread spins while another thread holds the lock of the connection. If it was woken on the core of that
    thread, the lock is released only after a tick of the scheduler: a message then takes 4 ms instead of 0.1 ms. With
    SCHED_BATCH a woken thread does not preempt a running one; an idle core still runs it at once.
    """
    if not _TASKS.is_dir():
        return
    for task in _TASKS.iterdir():
        # A thread may just have ended, and a sandbox may refuse the call: then messages are only slower.
        with contextlib.suppress(OSError):
            is_gloo = (task / "comm").read_text().strip() == _THREAD_NAME
            if is_gloo and os.sched_getscheduler(int(task.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


class Handle(Protocol):
    """A pending message."""

    def wait(self) -> object:
        """Return when the tensor may be read (received) or written again (sent)."""


class PendingCheck(Protocol):
    """A comparison of the ranks' collectives that is not complete; it may bring inline data of the previous rank."""

    def finish_check(self) -> None:
        """Return when all ranks do the same; raise on all of them when they do not."""

    def wait(self) -> None:
        """Return when the inline data has arrived and all ranks do the same."""

    def payload(self, like: torch.Tensor) -> torch.Tensor:
        """Return the inline data, with the size and dtype of `like`."""


class _NothingToMove:
    def wait(self) -> None:
        """Return at once: there was nothing to move."""


_DONE = _NothingToMove()


@dataclass
class ChannelState:
    """Byte counts, scratch memory and pending checks, shared by a channel and its subgroups."""

    sent_bytes: int = 0
    control_bytes: int = 0
    scratch: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)
    check: PendingCheck | None = None
    inline: PendingCheck | None = None
    """The check that brings inline data, until the collective takes it."""
    unchecked: list[_Message] = field(default_factory=list)
    """Messages sent before the check is complete; kept after a mismatch, as gloo may still read their memory."""
    locations: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """The locations of the ranks, by peers, where `topology` has found them."""
    records: dict[tuple[int, ...], GroupCalls] = field(default_factory=dict)
    """Where calls are recorded, by peers."""


class P2PChannel:
    """Point-to-point messages in a group; one channel serves all collectives of the group and keeps its scratch memory.

    `checked`: every collective compares what the ranks do before the first byte of data (`mismatch`).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, checked: bool = True) -> None:
        self.group = group
        self.checked = checked
        self.peers: tuple[int, ...] = tuple(range(dist.get_world_size(group)))
        self.rank = dist.get_rank(group)
        self.state = ChannelState()
        self._pg: Any = group if group is not None else dist.group.WORLD
        # Without the records of a user's own messages: the collective that these belong to is recorded.
        kind = dist.ProcessGroup
        self._send, self._recv = (getattr(function, "__wrapped__", function) for function in (kind.send, kind.recv))
        # nccl moves a tensor when both sides have requested it in one batch; gloo at any time.
        self.is_batched = "nccl" in dist.get_backend(group)
        if not self.is_batched:
            lower_network_threads()
        self.tag = 0
        self.calls = 0
        self.headers: dict[str, torch.Tensor] = {}
        """What this rank sends before a collective, by description (`mismatch`)."""
        self._requested: list[_BatchedReceive] = []

    @property
    def size(self) -> int:
        """How many ranks this channel connects."""
        return len(self.peers)

    @property
    def sent_bytes(self) -> int:
        """Bytes of data that this rank has sent."""
        return self.state.sent_bytes

    @property
    def control_bytes(self) -> int:
        """Bytes of headers that this rank has sent, in addition to the data."""
        return self.state.control_bytes

    @property
    def depth(self) -> int:
        """How many receives to post ahead of the one that is waited for."""
        return 1 if self.is_batched else DEPTH

    @property
    def device(self) -> torch.device:
        """Where tensors must be to be sent: gloo sends from host memory, nccl from the GPU."""
        return torch.device("cuda", torch.cuda.current_device()) if self.is_batched else torch.device("cpu")

    def subgroup(self, ranks: Sequence[int]) -> P2PChannel:
        """Return a channel of some of the ranks, including this one, numbered from 0; counts are shared."""
        part = object.__new__(P2PChannel)
        part.__dict__.update(self.__dict__)
        part.peers = tuple(self.peers[rank] for rank in ranks)
        part.rank = list(ranks).index(self.rank)
        part.calls = 0
        return part

    def finish_check(self) -> None:
        """Complete the pending check, if there is one."""
        check, self.state.check = self.state.check, None
        if check is not None:
            check.finish_check()
            self.state.unchecked.clear()

    def send(self, tensor: torch.Tensor, to: int, *, is_control: bool = False) -> Handle:
        """Begin to send a contiguous tensor, which must not change before the handle was waited for."""
        if tensor.numel() == 0:
            return _DONE
        if is_control:
            self.state.control_bytes += tensor.nbytes
        else:
            self.state.sent_bytes += tensor.nbytes
        peer = self.peers[to]
        if self.is_batched:
            tensor = _as_bytes(tensor)
            work = self._start_batch(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer))
        else:
            work = self._send(self._pg, [tensor], peer, 0 if is_control else self.tag)
        return self._tracked(_Message(self, work, peer, tensor, is_control))

    def receive(self, tensor: torch.Tensor, source: int, *, is_control: bool = False) -> Handle:
        """Begin to receive into a contiguous tensor, which is complete when the handle was waited for."""
        if tensor.numel() == 0:
            return _DONE
        peer = self.peers[source]
        if self.is_batched:
            operation = dist.P2POp(dist.irecv, _as_bytes(tensor), group=self.group, group_peer=peer)
            self._requested.append(_BatchedReceive(self, operation))
            return self._requested[-1]
        work = self._recv(self._pg, [tensor], peer, 0 if is_control else self.tag)
        return self._tracked(_Message(self, work, peer, tensor, is_control))

    def scratch(self, count: int, like: torch.Tensor, name: str = "") -> torch.Tensor:
        """Return memory for `count` elements like those of `like`; later calls with this name may return the same."""
        needed, key = count * like.element_size(), (name, like.device)
        buffer = self.state.scratch.get(key)
        if buffer is None or buffer.numel() < needed:
            buffer = self.state.scratch[key] = torch.empty(needed, dtype=torch.uint8, device=like.device)
        return buffer[:needed].view(like.dtype)

    def take_inline(self) -> PendingCheck | None:
        """Return the check that brings data inline with its header, if there is one; once."""
        inline, self.state.inline = self.state.inline, None
        return inline

    def _tracked(self, message: _Message) -> _Message:
        if self.state.check is not None and not message.is_control:
            self.state.unchecked.append(message)
        return message

    def _start_batch(self, *more: dist.P2POp) -> dist.Work | None:
        """Start the requested receives in one batch: alone, a send and a receive could wait for each other."""
        requested = list(self._requested)
        self._requested.clear()
        works = dist.batch_isend_irecv([*(receive.operation for receive in requested), *more])
        for receive in requested:
            receive.work = works[0]
        return works[-1] if works else None


@dataclass
class _Message:
    """A message that keeps its memory alive, and names its peer when it fails."""

    channel: P2PChannel
    work: dist.Work | None
    peer: int
    tensor: torch.Tensor
    is_control: bool

    def wait(self) -> None:
        """Wait for the message; data waits for the pending check first."""
        if not self.is_control:
            self.channel.finish_check()
        try:
            if self.work is not None:
                self.work.wait()
        except RuntimeError as error:
            reason = first_line(error)
            raise CommunicationError(
                f"the exchange with rank {self.peer} broke off: {reason}",
                hint=f"Look at the last output of rank {self.peer}: it has ended, or it waits elsewhere.",
            ) from error


@dataclass
class _BatchedReceive:
    """A receive that starts with the next send, or when it is waited for."""

    channel: P2PChannel
    operation: dist.P2POp
    work: dist.Work | None = None

    def wait(self) -> None:
        """Start it if nothing was sent since, and wait."""
        if self.work is None:
            self.channel._start_batch()
        if self.work is not None:
            self.work.wait()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View any dtype as bytes: nccl supports only some of them."""
    return (tensor if tensor.dim() == 1 else tensor.view(-1)).view(torch.uint8)
