"""Our collectives on point-to-point messages as an `Exchange`, in the shape that the machines ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.comm import basic, fixed_order, hierarchical, ring
from phalanx.comm.topology import find_places, hosts, ring_order
from phalanx.comm.wire import Wire

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class WireExchange:
    """A ring whose neighbours are near each other; with several ranks a host, only their leaders talk across hosts.

    `in_fixed_order` adds up by the tree of `fixed_order` instead, whatever the distances.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, in_fixed_order: bool = False) -> None:
        self._wire = Wire(group)
        self.rank, self.size = self._wire.rank, self._wire.size
        self._in_fixed_order = in_fixed_order
        places = find_places(self._wire)
        self._hosts = hosts(places)
        self._ring = self._wire.among(ring_order(places))

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, as the wire counted it."""
        return self._wire.sent_bytes

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks, in place."""
        if self._in_fixed_order:
            fixed_order.all_reduce(tensor, self._wire, op)
        elif 1 < len(self._hosts) < self.size:
            hierarchical.all_reduce(tensor, self._wire, op, groups=self._hosts)
        else:
            ring.all_reduce(tensor, self._ring, op)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank."""
        return ring.all_gather(tensor, self._wire)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here."""
        return basic.all_to_all(tensor, self._wire)
