"""Shared memory between the ranks of one node, where all share a host and /dev/shm has room."""

from __future__ import annotations

import warnings

import torch

from phalanx.comm.exchange import Exchange
from phalanx.comm.shm.barrier import has_futexes
from phalanx.comm.shm.pages import AllGatherText, machine_id
from phalanx.comm.shm.shared_group import SharedGroup
from phalanx.comm.shm.shared_numbers import SharedNumbers
from phalanx.errors import SharedMemoryUnavailable

__all__ = [
    "SharedExchange",
    "SharedGroup",
    "SharedNumbers",
    "on_one_machine",
    "share_gradients",
    "share_memory",
    "share_numbers",
]


class SharedExchange(Exchange):
    """An `Exchange` of the ranks of one node; tensors from `empty` are reduced in place."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory in the shared pages."""
        return self._group.empty(numel, dtype)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks, in place."""
        self.sent_bytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        self._group.all_reduce(tensor, op)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank."""
        self.sent_bytes += (self.size - 1) * tensor.nbytes
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._group.all_gather(gathered, tensor)
        return gathered

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here."""
        self.sent_bytes += (self.size - 1) * tensor.nbytes // self.size
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._group.all_to_all(received, tensor)
        return received

    def close(self) -> None:
        """Release the pages."""
        self._group.close()


def on_one_machine(gather_text: AllGatherText, rank: int) -> bool:
    """Whether all ranks are on this machine and it supports shared memory; equal on all ranks."""
    return len(set(gather_text(machine_id() if has_futexes() else f"rank {rank} has no futex"))) == 1


def share_memory(
    gather_text: AllGatherText, rank: int, size: int, *, timeout: float, room: int = 0
) -> SharedGroup | None:
    """Return the shared memory of ranks on one node, else None; all ranks call this.

    `room`: bytes that the caller will need for tensors. Where /dev/shm is too small, rank 0 warns.
    """
    if not on_one_machine(gather_text, rank):
        return None
    try:
        return SharedGroup(gather_text, rank, size, timeout=timeout, room=room)
    except SharedMemoryUnavailable as error:
        if rank == 0:
            warnings.warn(f"no shared memory between these ranks, gloo is used instead: {error}", stacklevel=3)
        return None


def share_gradients(
    gather_text: AllGatherText, rank: int, size: int, nbytes: int, *, timeout: float
) -> tuple[SharedExchange, torch.Tensor] | None:
    """Return an exchange of the ranks of this machine and `nbytes` of their shared memory, or None."""
    group = share_memory(gather_text, rank, size, timeout=timeout, room=nbytes)
    return None if group is None else (SharedExchange(group), group.empty(nbytes, torch.uint8))


def share_numbers(gather_text: AllGatherText, rank: int, size: int, *, timeout: float) -> SharedNumbers | None:
    """Return sums of numbers in the shared memory of ranks on one node, else None; all ranks call this."""
    if not on_one_machine(gather_text, rank):
        return None
    try:
        return SharedNumbers(gather_text, rank, size, timeout=timeout)
    except SharedMemoryUnavailable:  # a page or two: what needs more says that there is none
        return None
