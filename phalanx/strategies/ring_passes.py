"""A ring of ranks: each sends to the next and receives from the one before, while it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Flight:
    """A tensor on its way to the next rank, and the one that comes for it."""

    def __init__(self, sent: Tensor, arriving: Tensor, works: list[dist.Work], device: torch.device) -> None:
        self._sent = sent  # must live until it has left
        self._arriving = arriving
        self._works = works
        self._device = device

    def wait(self) -> Tensor:
        """Return what came from the rank before."""
        for work in self._works:
            work.wait()
        return self._arriving.to(self._device)


class Ring:
    """The ranks of a group in a circle."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._before = dist.get_global_rank(group, (self.rank - 1) % self.size)
        self._through_host = dist.get_backend(group) == "gloo"  # which cannot send memory of a GPU

    def send(self, tensor: Tensor, tag: int = 0) -> Flight:
        """Send a tensor on; the one that arrives has its shape and dtype."""
        sent = tensor.contiguous()
        if self._through_host:
            sent = sent.cpu()
        arriving = torch.empty_like(sent)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, self._next, self.group, tag),
                dist.P2POp(dist.irecv, arriving, self._before, self.group, tag),
            ]
        )
        return Flight(sent, arriving, works, tensor.device)

    def travel(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (owner, tensor) for every rank's tensor, its own first; the next is on its way by then."""
        here = mine
        for step in range(self.size):
            flight = self.send(here) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, here
            if flight is not None:
                here = flight.wait()
