"""Tensors that live in shared pages: every rank has one of the same size, and sees those of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.comm.shared.pages import SharedPages, round_up

if TYPE_CHECKING:
    from phalanx.comm.shared.telling import Tell


class SymmetricTensors:
    """Makes tensors in shared pages, and finds the peers of what lies in them by its address."""

    def __init__(self, tell: Tell, rank: int, size: int) -> None:
        self._tell, self._rank, self._size = tell, rank, size
        self._made: list[tuple[SharedPages, list[torch.Tensor]]] = []
        self._found: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's tensor; all ranks call this, with the same size."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        room = round_up(numel * dtype.itemsize)
        pages = SharedPages(self._tell, self._rank, self._size, self._size * room)
        everyones = [
            torch.frombuffer(pages.memory, dtype=torch.uint8, offset=rank * room, count=numel * dtype.itemsize)
            for rank in range(self._size)
        ]
        self._made.append((pages, everyones))
        return everyones[self._rank].view(dtype)

    def find(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        """Return what lies at the same place on each rank, if this flat, contiguous tensor lies in shared pages."""
        key = (flat.data_ptr(), flat.numel(), flat.dtype)
        found = self._found.get(key)
        if found is None:
            for _, everyones in self._made:
                offset = flat.data_ptr() - everyones[self._rank].data_ptr()
                if offset >= 0 and offset + flat.nbytes <= everyones[self._rank].nbytes:
                    found = [one[offset : offset + flat.nbytes].view(flat.dtype) for one in everyones]
                    self._found[key] = found
        return found

    def close(self) -> None:
        """Let go of the files; the memory stays as long as tensors live in it."""
        for pages, _ in self._made:
            pages.close()
        self._made.clear()
        self._found.clear()
        del self._tell  # it leads back to the group, which would keep the pages until a collection of garbage
