"""Collectives of the ranks of one node, in shared memory.

A tensor in shared pages (`SharedGroup.empty`) is reduced in place: rank r adds up part r of all ranks' tensors and
writes the sum back to each. Any other tensor goes through a small staging area in rounds: each rank writes what the
others need, all wait at the barrier, each reads what it needs. The staging area has two halves that take turns, so that
no rank overwrites what a slower one still reads.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.comm.reduction import combine_in_order
from phalanx.comm.shm.barrier import SLOT, ShmBarrier
from phalanx.comm.shm.pages import (
    AllGatherText,
    SharedPages,
    SymmetricTensors,
    group_text_gatherer,
    round_up,
    text_gatherer,
)
from phalanx.observe.call_ring import CallRing, GroupCalls, call_ring

HALF = 2 << 20
"""Bytes of half a rank's staging area: small enough for the cache, large enough that a barrier costs little."""
ONE_SHOT = 64 << 10
"""Up to this many bytes every rank adds up everything itself: one barrier instead of two."""
ONE_SHOT_IN_PLACE = 16 << 10
"""The same for tensors in shared pages, which are copied for it."""
_MAX_CACHED = 512
"""Entries in the caches of signatures and of views: models need few."""
BLOCK = 1 << 20
"""Bytes of all ranks together that are added up and written back at a time, so that they stay in the cache."""


class SharedGroup:
    """The ranks of one node. Every call is made by all of them, in the same order, by one thread."""

    def __init__(
        self,
        gather_text: AllGatherText,
        rank: int,
        size: int,
        *,
        timeout: float = 600.0,
        room: int = 0,
        half: int | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        if half is None:
            # A barrier costs more where ranks share a core; rank 0 decides, as ranks may be pinned unequally.
            half_here = HALF if size <= len(os.sched_getaffinity(0)) else 2 * HALF
            half = int(gather_text(str(half_here))[0])
        self._half = half
        slots = round_up(size * SLOT)
        later = size * round_up(room)  # for calls of `empty`
        self._pages = SharedPages(gather_text, rank, size, slots + 2 * size * half, later=later)
        self._barrier = ShmBarrier(self._pages, timeout)
        staging = torch.frombuffer(self._pages.memory, dtype=torch.uint8, offset=slots, count=2 * size * half)
        self._staging = staging.view(2, size, half)
        self._views: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._tiny, self._small = min(ONE_SHOT_IN_PLACE, half), min(ONE_SHOT, half)
        self._firsts: dict[tuple[torch.dtype, int, int], list[torch.Tensor]] = {}
        self._turn = 0
        self._signatures: dict[tuple[object, ...], bytes] = {}
        self._others = [peer for peer in range(size) if peer != rank]
        ring = call_ring()
        self._records = None if ring is None else join_ring(ring, gather_text, rank)

        def all_gather(gathered: list[torch.Tensor], tensor: torch.Tensor) -> None:
            rows = torch.empty(size, tensor.numel(), dtype=tensor.dtype)
            self.all_gather(rows, tensor)
            for one, row in zip(gathered, rows, strict=True):
                one.copy_(row)

        self._symmetric = SymmetricTensors(text_gatherer(all_gather, size), rank, size)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None, *, timeout: float = 600.0) -> SharedGroup:
        """Return the shared memory of a process group whose ranks are on one node; all of them call this."""
        return cls(group_text_gatherer(group), dist.get_rank(group), dist.get_world_size(group), timeout=timeout)

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a flat tensor in shared pages; all ranks call this, with the same size."""
        self._enter("empty", "", dtype, (numel,))
        return self._symmetric.empty(numel, dtype)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._enter("barrier", "", torch.uint8)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks, in place; all ranks get the same bits."""
        flat, shape = _flat(tensor), tensor.shape
        if op == "mean" and tensor.dtype == torch.float16:  # a sum would overflow where the mean does not
            flat.mul_(1.0 / self.size)
            op = "sum"
        nbytes = flat.nbytes
        if nbytes <= self._tiny:
            self._reduce_at_once(flat, op, shape)
        elif (peers := self._symmetric.find(flat)) is not None:
            self._reduce_in_place(peers, op, shape)
        elif nbytes <= self._small:
            self._reduce_at_once(flat, op, shape)
        else:
            self._reduce_staged(flat, op, shape)
        _back(tensor, flat)

    def _reduce_at_once(self, flat: torch.Tensor, op: str, shape: torch.Size) -> None:
        count = flat.numel()
        parts = self._first(flat.dtype, count)
        if count:
            parts[self.rank].copy_(flat)
        self._enter("all_reduce", op, flat.dtype, shape)
        if count:
            combine_in_order(parts, flat, op)

    def _reduce_in_place(self, peers: list[torch.Tensor], op: str, shape: torch.Size) -> None:
        mine = peers[self.rank]
        self._enter("all_reduce in place", op, mine.dtype, shape)
        begin, end = self._segment(mine.numel(), self.rank)
        block = max(BLOCK // self.size, ONE_SHOT) // mine.element_size()
        for start in range(begin, end, block):
            parts = [peer[start : min(start + block, end)] for peer in peers]
            combine_in_order(parts, parts[self.rank], op)
            for peer in self._others:
                parts[peer].copy_(parts[self.rank])
        self._barrier.wait()

    def _reduce_staged(self, flat: torch.Tensor, op: str, shape: torch.Size) -> None:
        self._enter("all_reduce", op, flat.dtype, shape)
        for begin, end in self._rounds(flat.numel(), flat.element_size()):
            part = flat[begin:end]
            stage = self._next_half(part.dtype)
            for peer in self._others:
                begin, end = self._segment(part.numel(), peer)
                stage[self.rank][begin:end].copy_(part[begin:end])
            self._barrier.wait()
            begin, end = self._segment(part.numel(), self.rank)
            mine = part[begin:end]
            combine_in_order([mine if r == self.rank else stage[r][begin:end] for r in range(self.size)], mine, op)
            stage[self.rank][begin:end].copy_(mine)
            self._barrier.wait()
            for peer in self._others:
                begin, end = self._segment(part.numel(), peer)
                part[begin:end].copy_(stage[peer][begin:end])

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks; rank r gets the r-th of its equal parts."""
        rows, out_flat = tensor.data.reshape(self.size, -1), _flat(out)
        self._enter("reduce_scatter", op, rows.dtype, tensor.shape)
        for begin, end in self._rounds(rows.shape[1], rows.element_size(), parts=self.size):
            stage, width = self._next_half(rows.dtype), end - begin
            for peer in self._others:
                stage[self.rank][peer * width : (peer + 1) * width].copy_(rows[peer, begin:end])
            self._barrier.wait()
            mine = slice(self.rank * width, (self.rank + 1) * width)
            parts = [rows[self.rank, begin:end] if r == self.rank else stage[r][mine] for r in range(self.size)]
            combine_in_order(parts, out_flat[begin:end], op)
        _back(out, out_flat)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Collect the ranks' tensors in `out`, in the order of ranks."""
        rows, flat = _flat(out), tensor.data.reshape(-1)
        by_rank = rows.view(self.size, -1)
        self._enter("all_gather", "", flat.dtype, tensor.shape)
        for begin, end in self._rounds(flat.numel(), flat.element_size()):
            stage = self._next_half(flat.dtype)
            stage[self.rank][: end - begin].copy_(flat[begin:end])
            self._barrier.wait()
            for peer in range(self.size):
                by_rank[peer, begin:end].copy_(stage[peer][: end - begin])
        _back(out, rows)

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Send the r-th of a tensor's equal parts to rank r; `out` gets what the ranks sent here, in their order."""
        rows, received = tensor.data.reshape(self.size, -1), _flat(out)
        by_rank = received.view(self.size, -1)
        self._enter("all_to_all", "", rows.dtype, tensor.shape)
        for begin, end in self._rounds(rows.shape[1], rows.element_size(), parts=self.size):
            stage, width = self._next_half(rows.dtype), end - begin
            stage[self.rank][: self.size * width].view(self.size, width).copy_(rows[:, begin:end])
            self._barrier.wait()
            for peer in range(self.size):
                by_rank[peer, begin:end].copy_(stage[peer][self.rank * width : (self.rank + 1) * width])
        _back(out, received)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copy the root's tensor to all ranks, in place."""
        flat = _flat(tensor)
        self._enter(f"broadcast from {root}", "", flat.dtype, tensor.shape)
        for begin, end in self._rounds(flat.numel(), flat.element_size()):
            stage = self._next_half(flat.dtype)[root]
            if self.rank == root:
                stage[: end - begin].copy_(flat[begin:end])
            self._barrier.wait()
            if self.rank != root:
                flat[begin:end].copy_(stage[: end - begin])
        _back(tensor, flat)

    def announce(self, call: str) -> None:
        """Check that all ranks call the same collective, before one that does not use shared memory."""
        self._meet(call.encode())

    def close(self) -> None:
        """Release the pages; their memory is freed when no tensor uses it."""
        self._symmetric.close()
        self._views.clear()
        self._firsts.clear()
        self._pages.close()

    def _enter(self, kind: str, op: str, dtype: torch.dtype, shape: Sequence[int] = ()) -> None:
        """Wait at the barrier, and check that all ranks call the same collective."""
        key = (kind, op, dtype, shape)
        signature = self._signatures.get(key)
        if signature is None:
            if len(self._signatures) >= _MAX_CACHED:
                self._signatures.clear()
            text = f"{kind} {op} of {tuple(shape)} {str(dtype).removeprefix('torch.')}".replace("  ", " ")
            signature = self._signatures[key] = text.encode()
        self._meet(signature)

    def _meet(self, signature: bytes) -> None:
        records = self._records
        if records is None:
            self._barrier.wait(signature)
            return
        records.enter(signature)
        self._barrier.wait(signature)
        records.done = records.number

    def _segment(self, numel: int, rank: int) -> tuple[int, int]:
        """Return the range of `numel` elements that a rank combines: equal parts, the last may be shorter."""
        share = -(-numel // self.size)
        return min(rank * share, numel), min((rank + 1) * share, numel)

    def _rounds(self, numel: int, element_size: int, parts: int = 1) -> list[tuple[int, int]]:
        """Cut `numel` elements into rounds, of which `parts` times as much fits into half a staging area."""
        share = self._half // element_size // parts
        return [(begin, min(begin + share, numel)) for begin in range(0, numel, share)]

    def _first(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Return the first `count` elements of the ranks' staging areas of this turn; cached, for small calls."""
        stage = self._next_half(dtype)
        key = (dtype, self._turn, count)
        parts = self._firsts.get(key)
        if parts is None:
            if len(self._firsts) >= _MAX_CACHED:
                self._firsts.clear()
            parts = self._firsts[key] = [part[:count] for part in stage]
        return parts

    def _next_half(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the ranks' staging areas of this turn, as tensors of a dtype."""
        self._turn ^= 1
        views = self._views.get((dtype, self._turn))
        if views is None:
            views = [self._staging[self._turn, peer].view(dtype) for peer in range(self.size)]
            self._views[dtype, self._turn] = views
        return views


_groups = itertools.count()


def join_ring(ring: CallRing, gather_text: AllGatherText, rank: int) -> GroupCalls:
    """Agree with the other ranks on a name under which this group's calls are recorded."""
    global_rank = dist.get_rank() if dist.is_initialized() else rank
    texts = [text.split() for text in gather_text(f"{global_rank} {next(_groups)}")]
    return ring.group(f"shared memory {texts[0][0]}.{texts[0][1]}", [int(text[0]) for text in texts])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view, or a copy for `_back`; by `data`, as collectives take no part in autograd."""
    return tensor.data.contiguous().view(-1)


def _back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        tensor.data.copy_(flat.view(tensor.shape))
