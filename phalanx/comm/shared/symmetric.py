"""Tensors that live in shared pages: every rank has one of the same size, and sees those of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.comm.shared.pages import SharedPages, round_up

if TYPE_CHECKING:
    from phalanx.comm.shared.pages import Tell


class SymmetricTensors:
    """Makes tensors in shared pages, and finds the peers of one of them by its address."""

    def __init__(self, tell: Tell, rank: int, size: int) -> None:
        self._tell, self._rank, self._size = tell, rank, size
        self._by_address: dict[int, tuple[SharedPages, list[torch.Tensor]]] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's tensor; all ranks call this, with the same size."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        room = round_up(numel * dtype.itemsize)
        pages = SharedPages(self._tell, self._rank, self._size, self._size * room)
        tensors = [
            torch.frombuffer(pages.memory, dtype=dtype, offset=rank * room, count=numel) for rank in range(self._size)
        ]
        self._by_address[tensors[self._rank].data_ptr()] = (pages, tensors)
        return tensors[self._rank]

    def find(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the ranks' tensors if this is one of them (whole), else None."""
        _, tensors = self._by_address.get(tensor.data_ptr(), (None, None))
        if tensors is None or tensors[0].numel() != tensor.numel() or tensors[0].dtype != tensor.dtype:
            return None
        return tensors

    def release(self, tensor: torch.Tensor) -> None:
        """Forget a tensor: its pages go when nobody uses it any more."""
        pages, _ = self._by_address.pop(tensor.data_ptr(), (None, None))
        if pages is not None:
            pages.close()

    def close(self) -> None:
        """Let go of the files; the memory stays as long as the tensors live."""
        for pages, _ in self._by_address.values():
            pages.close()
        self._by_address.clear()
