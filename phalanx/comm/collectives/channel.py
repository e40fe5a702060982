"""The scheduling of gloo's network threads.

gloo's thread looks at its sockets and tries the lock of the connection. When another thread holds the lock it looks
again at once, for as long as it is given the core. If it was woken on the core of the very thread that holds the lock,
that thread can go on only after a tick of the scheduler: every message then takes 4 ms (with 250 ticks per second)
instead of 0.1 ms. A thread of the policy SCHED_BATCH does not take the core from a running thread when it is woken, so
the holder finishes first. An idle core still takes the woken thread at once.

The wire: point-to-point messages between the ranks of a group, and a count of what was sent.

Every collective of ours is written on these two verbs, `send` and `receive`, so that reading one of them shows every
byte it moves. Messages between two ranks arrive in the order in which they were sent; a wire belongs to one thread.

Before data, ranks tell each other what they mean to do (`signature`). On gloo nobody waits for the answer: data carries
a tag made of the meaning, so that it reaches only a rank that means the same, and the answer is read when data is first
waited for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from phalanx.errors import CommunicationError

_THREAD_NAME = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")


def let_compute_go_first() -> None:
    """Put gloo's network threads of this process behind threads that compute, where threads have names."""
    if not _TASKS.is_dir():
        return
    for task in _TASKS.iterdir():
        # A thread may just have ended, and a sandbox may refuse the call: then messages are only slower.
        with contextlib.suppress(OSError):
            if _name_of(task) == _THREAD_NAME and os.sched_getscheduler(int(task.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _name_of(task: Path) -> str:
    return (task / "comm").read_text().strip()


CHUNK_BYTES = 4 << 20
"""Large tensors travel in pieces of this size. Smaller ones overlap better but pay for every message: gloo wakes two
threads for each."""

DEPTH = 8
"""Receives that are posted ahead on gloo: data then flows as soon as it is sent, without asking first."""


class Handle(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Return when the tensor may be read (received) or written again (sent)."""


class PendingCheck(Protocol):
    """What was asked of the other ranks and not yet answered by all."""

    def settle(self) -> None:
        """Return when all ranks mean the same; raise on all of them when they do not."""


class Inline(Protocol):
    """Data that travels in one message with a header."""

    def wait(self) -> None:
        """Return when it is here and all ranks mean the same."""

    def payload(self, like: torch.Tensor) -> torch.Tensor:
        """Return it, as values such as those of `like`."""


class _Done:
    def wait(self) -> None:
        """Return at once: there was nothing to move."""


_DONE = _Done()


@dataclass
class ChannelState:
    """What a rank has sent, the memory its wires receive into before they add up, and what is still open."""

    sent_bytes: int = 0
    control_bytes: int = 0
    scratch: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)
    question: PendingCheck | None = None
    inline: Inline | None = None
    """Data that came with a header, until the collective takes it."""
    unanswered: list[_Message] = field(default_factory=list)
    """Messages under way before the question is answered; after a "no" they are kept, for gloo may still read them."""
    places: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """Where the ranks are, by wire, once `topology` has found out."""


class P2PChannel:
    """Point-to-point between the ranks of a group. Use one wire for all collectives of a group: it keeps its scratch.

    `checked` makes every collective compare what the ranks mean to do before the first byte of data (`signature`).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, checked: bool = True) -> None:
        self.group = group
        self.checked = checked
        self.peers: tuple[int, ...] = tuple(range(dist.get_world_size(group)))
        self.rank = dist.get_rank(group)
        self.tally = ChannelState()
        self._pg: Any = group if group is not None else dist.group.WORLD
        # nccl moves a tensor when both sides have asked for it in one batch; gloo at any time.
        self.is_batched = "nccl" in dist.get_backend(group)
        if not self.is_batched:
            let_compute_go_first()
        self.tag = 0
        self.calls = 0
        self.headers: dict[str, torch.Tensor] = {}
        """What this rank says before a collective, by its description (`signature`)."""
        self._asked: list[_BatchedReceive] = []

    @property
    def size(self) -> int:
        """How many ranks this wire connects."""
        return len(self.peers)

    @property
    def sent_bytes(self) -> int:
        """Bytes of data that this rank has sent."""
        return self.tally.sent_bytes

    @property
    def control_bytes(self) -> int:
        """Bytes that this rank has sent beside the data: the headers by which ranks find out that they agree."""
        return self.tally.control_bytes

    @property
    def depth(self) -> int:
        """How many receives to post ahead of the one that is waited for."""
        return 1 if self.is_batched else DEPTH

    @property
    def device(self) -> torch.device:
        """Where tensors must live to travel: gloo sends from host memory, nccl from the GPU."""
        return torch.device("cuda", torch.cuda.current_device()) if self.is_batched else torch.device("cpu")

    def subgroup(self, ranks: Sequence[int]) -> P2PChannel:
        """Return this wire as some of its ranks see it, this one among them: numbered anew, counted together."""
        part = object.__new__(P2PChannel)
        part.__dict__.update(self.__dict__)
        part.peers = tuple(self.peers[rank] for rank in ranks)
        part.rank = list(ranks).index(self.rank)
        part.calls = 0
        return part

    def settle(self) -> None:
        """Wait until the other ranks have said that they mean the same, if that is still open."""
        question, self.tally.question = self.tally.question, None
        if question is not None:
            question.settle()
            self.tally.unanswered.clear()

    def send(self, tensor: torch.Tensor, to: int, *, is_control: bool = False) -> Handle:
        """Begin to send a contiguous tensor; it must stay as it is until the handle was waited for."""
        if tensor.numel() == 0:
            return _DONE
        if is_control:
            self.tally.control_bytes += tensor.nbytes
        else:
            self.tally.sent_bytes += tensor.nbytes
        peer = self.peers[to]
        if self.is_batched:
            tensor = _as_bytes(tensor)
            work = self._start_batch(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer))
        else:
            work = self._pg.send([tensor], peer, 0 if is_control else self.tag)
        return self._under_way(_Message(self, work, peer, tensor, is_control))

    def receive(self, tensor: torch.Tensor, source: int, *, is_control: bool = False) -> Handle:
        """Begin to receive into a contiguous tensor; it is whole when the handle was waited for."""
        if tensor.numel() == 0:
            return _DONE
        peer = self.peers[source]
        if self.is_batched:
            asked = _BatchedReceive(self, dist.P2POp(dist.irecv, _as_bytes(tensor), group=self.group, group_peer=peer))
            self._asked.append(asked)
            return asked
        work = self._pg.recv([tensor], peer, 0 if is_control else self.tag)
        return self._under_way(_Message(self, work, peer, tensor, is_control))

    def scratch(self, count: int, like: torch.Tensor, name: str = "") -> torch.Tensor:
        """Return memory for `count` elements such as those of `like`; the next call by a name may return the same."""
        needed, key = count * like.element_size(), (name, like.device)
        held = self.tally.scratch.get(key)
        if held is None or held.numel() < needed:
            held = self.tally.scratch[key] = torch.empty(needed, dtype=torch.uint8, device=like.device)
        return held[:needed].view(like.dtype)

    def take_inline(self) -> Inline | None:
        """Return what came with the header of this collective, if data did; once."""
        inline, self.tally.inline = self.tally.inline, None
        return inline

    def _under_way(self, message: _Message) -> _Message:
        if self.tally.question is not None and not message.is_control:
            self.tally.unanswered.append(message)
        return message

    def _start_batch(self, *more: dist.P2POp) -> dist.Work | None:
        """Hand nccl what was asked for so far, as one batch: alone, a send and a receive could wait for each other."""
        asked = list(self._asked)
        self._asked.clear()
        works = dist.batch_isend_irecv([*(receive.operation for receive in asked), *more])
        for receive in asked:
            receive.work = works[0]
        return works[-1] if works else None


@dataclass
class _Message:
    """A message that holds on to its memory, and knows its peer when it fails."""

    channel: P2PChannel
    work: dist.Work | None
    peer: int
    tensor: torch.Tensor
    is_control: bool

    def wait(self) -> None:
        """Wait, and say whose message it was when it does not come. Data waits for the answer to the question first."""
        if not self.is_control:
            self.channel.settle()
        try:
            if self.work is not None:
                self.work.wait()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise CommunicationError(
                f"the exchange with rank {self.peer} broke off: {reason}",
                hint=f"Look at what rank {self.peer} said last: it has ended, or it waits elsewhere.",
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
    """View any dtype as bytes: nccl knows only some of them. gloo's messages are bytes already."""
    return (tensor if tensor.dim() == 1 else tensor.view(-1)).view(torch.uint8)
