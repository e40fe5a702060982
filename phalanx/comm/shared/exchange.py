"""Shared memory as an `Exchange`, for gradients that live in its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from phalanx.comm.shared.group import SharedGroup


class SharedExchange:
    """The ranks of one machine; `empty` gives tensors that are added up where they lie."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.sent_bytes = 0

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
        """Let go of the pages."""
        self._group.close()
