"""Records a rank's own point-to-point calls over gloo, and counts those over nccl, which torch's flight recorder has.

`send`, `recv`, `isend`, `irecv` and `batch_isend_irecv` all call a method of the process group, which is wrapped here,
and wait by `Work.wait`. A message counts as waited for only in there: many programs never wait for what they send.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from time import time as now
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from phalanx.diagnosis.records import CallHistory
from phalanx.observe.call_ring import CallRing, PairCalls, call_ring
from phalanx.torch_compat import source_rank

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

_ANY = -1
"""In place of the sender's rank, where a receive takes what comes first."""
_Key = tuple[int, str, int, int]
"""The group's id as long as it lives, the operation, the other rank in the group, and the tag."""


def record_messages() -> None:
    """Record point-to-point calls from now on, where collectives are recorded."""
    ring = call_ring()
    if ring is not None:
        recorder = _Recorder(ring)
        for name in ("send", "recv", "recv_anysource"):
            recorder.wrap_start(name)
        recorder.wrap_wait()


class _Recorder:
    """Numbers the messages of each pair of ranks, and notes which of them are waited for."""

    def __init__(self, ring: CallRing) -> None:
        self._ring = ring
        self._pairs: dict[_Key, PairCalls] = {}
        """Both ends begin to count with the group: a later one may have its name."""
        self._works: dict[int, tuple[weakref.ref[Work], PairCalls, int, ProcessGroup | None]] = {}
        """The message of each work that has not been waited for, by the work's id; the group where any rank may send.

        An id may be that of a later work. The entry of a work that is never waited for stays until then.
        """

    def wrap_start(self, name: str) -> None:
        """Record the messages that a method of process groups sends or requests."""
        original, pairs, works = getattr(dist.ProcessGroup, name), self._pairs, self._works
        op, reference, counts = name[:4], weakref.ref, CallHistory.messages

        def start(group: ProcessGroup, tensors: Sequence[Tensor], *places: int) -> Work:
            work: Work
            tensor = tensors[0]
            if tensor.is_cuda:
                if len(places) == 2:
                    counts[group.group_name, op, places[0]] += 1
                work = original(group, tensors, *places)
                return work
            peer, tag = places if len(places) == 2 else (_ANY, *places)
            pair = pairs.get((id(group), op, peer, tag)) or self._add(group, op, peer, tag)
            number = pair.begin(tensor.shape, tensor.dtype)
            work = original(group, tensors, *places)
            works[id(work)] = reference(work), pair, number, group if peer == _ANY else None
            return work

        functools.update_wrapper(start, original)
        # For a group that is written in Python, torch calls what has the method's name, unless code of that name calls.
        start.__code__ = start.__code__.replace(co_name=name)
        setattr(dist.ProcessGroup, name, start)

    def wrap_wait(self) -> None:
        """Note which messages are waited for; one whose wait fails stays noted."""
        original, works = dist.Work.wait, self._works

        @functools.wraps(original)
        def wait(work: Work, *args: Any, **kwargs: Any) -> bool:
            message = works.pop(id(work), None)
            if message is None or message[0]() is not work:
                return original(work, *args, **kwargs)
            _, pair, number, group = message
            pair.waits[number] = now()
            result = original(work, *args, **kwargs)
            del pair.waits[number]
            if group is not None:
                self._count_source(work, group, pair)
            return result

        setattr(dist.Work, original.__name__, wait)

    def _count_source(self, work: Work, group: ProcessGroup, pair: PairCalls) -> None:
        """Count a message of any rank with those of the rank that has sent it."""
        source, tag = source_rank(work), int(pair.name.rpartition(" ")[2])
        calls = self._pairs.get((id(group), "recv", source, tag)) or self._add(group, "recv", source, tag)
        calls.begin((), "")

    def _add(self, group: ProcessGroup, op: str, other: int, tag: int) -> PairCalls:
        """Begin to record the messages to or from a rank of a group, until the group is freed."""
        rank, members = dist.get_rank(), dist.get_process_group_ranks(group)
        peer = _ANY if other == _ANY else members[other]
        sender, receiver = (rank, peer) if op == "send" else (peer, rank)
        peer_text = "any rank" if peer == _ANY else f"rank {peer}"
        text = f"{op} {'to' if op == 'send' else 'from'} {peer_text}{f' with tag {tag}' if tag else ''}"
        ends = members if peer == _ANY else [sender, receiver]
        key = (id(group), op, other, tag)
        self._pairs[key] = self._ring.pair(f"{group.group_name} {sender}>{receiver} {tag}", ends, text, peer)
        weakref.finalize(group, self._pairs.pop, key, None).atexit = False
        return self._pairs[key]
