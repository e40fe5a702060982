"""The collectives that gradient synchronisation and compression need, as one interface (`Exchange`).

`TorchExchange` is torch's process group; `ThrottledExchange` emulates a slow link: it sleeps for as long as its bytes
would take at a given rate, for machines where the kernel cannot shape traffic (`phalanx bench compression` says which
of the two it used).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


class Exchange(Protocol):
    """A group of ranks that can add up, collect and swap tensors. Every call is made by all ranks, in one order."""

    rank: int
    size: int

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, by the algorithm's own count."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Add up a tensor over the ranks, in place, or combine it by another operation (mean, max)."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank; all have one shape."""

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here, by rank."""

    def close(self) -> None:
        """Let go of what it holds; nothing is said to other ranks, which may be gone."""


class TorchExchange:
    """An `Exchange` over a process group of torch.distributed: gloo, nccl, or ours."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.sent_bytes = 0

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks, in place."""
        self.sent_bytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        if op == "mean":  # divided first, as torch's DDP does: the same bits, and fp16 does not overflow
            tensor.mul_(1.0 / self.size)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=self.group)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank."""
        self.sent_bytes += (self.size - 1) * tensor.nbytes
        gathered = tensor.new_empty((self.size, *tensor.shape))
        _gather_flat(gathered.view(-1), tensor.reshape(-1), group=self.group)
        return gathered

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here."""
        self.sent_bytes += (self.size - 1) * tensor.nbytes // self.size
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor.contiguous(), group=self.group)
        return received

    def close(self) -> None:
        """Leave the group as it is: torch keeps it until the ranks leave each other."""


class Alone:
    """An `Exchange` of one rank: everything is there already."""

    rank, size, sent_bytes = 0, 1, 0

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Leave the tensor as it is."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as the only row."""
        return tensor.unsqueeze(0)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor: its one row is for this rank."""
        return tensor

    def close(self) -> None:
        """Nothing is held."""


_emulated: float | None = None


class ThrottledExchange:
    """An exchange whose every call takes at least as long as its bytes on a link of `bytes_per_second`."""

    def __init__(self, inner: Exchange, bytes_per_second: float) -> None:
        self._inner = inner
        self._rate = bytes_per_second
        self.rank = inner.rank
        self.size = inner.size
        self.sent_bytes = inner.sent_bytes

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks, in place."""
        with self._at_rate():
            self._inner.all_reduce(tensor, op)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank."""
        with self._at_rate():
            return self._inner.all_gather(tensor)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here."""
        with self._at_rate():
            return self._inner.all_to_all(tensor)

    def close(self) -> None:
        """Let go of what the real exchange holds."""
        self._inner.close()

    @contextmanager
    def _at_rate(self) -> Iterator[None]:
        begin, before = time.perf_counter(), self.sent_bytes
        yield
        self.sent_bytes = self._inner.sent_bytes
        due = begin + (self.sent_bytes - before) / self._rate
        time.sleep(max(0.0, due - time.perf_counter()))


@contextmanager
def emulated_link(bytes_per_second: float) -> Iterator[None]:
    """Have every exchange that is opened meanwhile, in this process, run at a rate."""
    global _emulated
    before, _emulated = _emulated, bytes_per_second
    try:
        yield
    finally:
        _emulated = before


def is_emulated() -> bool:
    """Whether exchanges are opened at a rate of ours."""
    return _emulated is not None


def open_exchange(group: dist.ProcessGroup | None) -> Exchange:
    """Return the exchange of a process group, slowed down where a link is emulated."""
    exchange = TorchExchange(group)
    return exchange if _emulated is None else ThrottledExchange(exchange, _emulated)
