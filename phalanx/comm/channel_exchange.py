"""`Exchange` on our own collectives, with the algorithm chosen from the topology."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.comm.collectives import direct, fixed_order, hierarchical, ring
from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.topology import (
    RankLocation,
    find_locations,
    hosts,
    measure_links,
    near_groups,
    ring_order,
    with_switches,
)

_MEASURABLE = 16
"""Up to so many hosts all pairs are measured when they meet; more would take too long, and have a scheduler's names."""
_PROBE_BYTES = 256 << 10


class ChannelExchange:
    """A ring whose neighbours are near each other; with several ranks a host, only their leaders talk across hosts.

    `in_fixed_order` adds up by the tree of `fixed_order` instead, whatever the distances.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, in_fixed_order: bool = False) -> None:
        self._wire = P2PChannel(group)
        self.rank, self.size = self._wire.rank, self._wire.size
        self._in_fixed_order = in_fixed_order
        places = _locations(self._wire)
        self._hosts = hosts(places)
        self._ring = self._wire.subgroup(ring_order(places))

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, as the wire counted it."""
        return self._wire.sent_bytes

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks, in place."""
        if op == "mean" and tensor.dtype == torch.float16:  # a sum would overflow where the mean does not
            tensor.mul_(1.0 / self.size)
            op = "sum"
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
        return direct.all_to_all(tensor, self._wire)

    def close(self) -> None:
        """Leave the group as it is: torch keeps it until the ranks leave each other."""


def _locations(channel: P2PChannel) -> list[RankLocation]:
    """Return where the ranks are; which hosts are near each other is measured where several are and nothing says it."""
    places = find_locations(channel)
    groups = hosts(places)
    if 2 < len(groups) <= _MEASURABLE and not any(place.switch for place in places):
        places = with_switches(places, _near_hosts(channel, groups))
    return places


def _near_hosts(channel: P2PChannel, groups: list[list[int]]) -> list[list[int]]:
    """Have the hosts' leaders measure the links between them; return the ranks of hosts that are near each other."""
    leaders = [group[0] for group in groups]
    own = torch.tensor([-1])
    if channel.rank in leaders:
        found = near_groups(measure_links(channel.subgroup(leaders), nbytes=_PROBE_BYTES, rounds=3))
        own[0] = next(number for number, near in enumerate(found) if leaders.index(channel.rank) in near)
    told = ring.all_gather(own.to(channel.device), channel).flatten().tolist()
    near: dict[int, list[int]] = {}
    for group in groups:
        near.setdefault(told[group[0]], []).extend(group)
    return list(near.values())
