"""Hierarchical: within a host, across the hosts' leaders, within the host again.

Links between hosts are slow. Here each host sends over them what one rank of a ring sends, for any number of ranks: the
ranks of a host first combine at their leader (its first rank), the leaders run a ring, and each broadcasts the result
within its host. On one host this is the tree.

`ChannelExchange` chooses between this, a ring of near neighbours and a fixed order from the topology.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.comm.collectives import direct, fixed_order, ring
from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.chunks import start_reduction, write_back
from phalanx.comm.collectives.topology import (
    RankLocation,
    find_locations,
    hosts,
    measure_links,
    near_groups,
    ring_order,
    with_switches,
)
from phalanx.comm.collectives.tree import climb, descend
from phalanx.comm.exchange import Exchange
from phalanx.errors import UsageError

_MEASURABLE = 16
"""Largest number of hosts whose links are all measured at the start; more would take too long."""
_PROBE_BYTES = 256 << 10


def all_reduce(
    tensor: torch.Tensor, channel: P2PChannel, op: str = "sum", *, groups: Sequence[Sequence[int]] | None = None
) -> None:
    """Combine a tensor over all ranks, in place. `groups`: the ranks of each host; None: as `topology` finds them."""
    groups = groups if groups is not None else hosts(find_locations(channel))
    flat, reduction = start_reduction(f"hierarchical all_reduce over {len(groups)} hosts", tensor, channel, op)
    if sorted(rank for group in groups for rank in group) != list(range(channel.size)):
        raise UsageError(
            f"the hosts {[list(group) for group in groups]} do not hold each of the {channel.size} ranks once",
            hint="Write one list of ranks per host, such as [[0, 1], [2, 3]].",
        )
    within = channel.subgroup(next(group for group in groups if channel.rank in group))
    climb(flat, within, reduction)
    if within.rank == 0:
        ring.reduce_among(flat, channel.subgroup([group[0] for group in groups]), reduction, ranks=channel.size)
    descend(flat, within)
    write_back(flat, tensor)


class ChannelExchange(Exchange):
    """An `Exchange` over P2PChannel: hierarchical with several ranks per host, else a ring of near neighbours.

    `in_fixed_order`: always in the order of `fixed_order`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, in_fixed_order: bool = False) -> None:
        self._channel = P2PChannel(group)
        self.rank, self.size = self._channel.rank, self._channel.size
        self._in_fixed_order = in_fixed_order
        locations = _locations(self._channel)
        self._hosts = hosts(locations)
        self._ring = self._channel.subgroup(ring_order(locations))

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """Bytes of data that this rank has sent."""
        return self._channel.sent_bytes

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks, in place."""
        if op == "mean" and tensor.dtype == torch.float16:  # a sum would overflow where the mean does not
            tensor.mul_(1.0 / self.size)
            op = "sum"
        if self._in_fixed_order:
            fixed_order.all_reduce(tensor, self._channel, op)
        elif 1 < len(self._hosts) < self.size:
            all_reduce(tensor, self._channel, op, groups=self._hosts)
        else:
            ring.all_reduce(tensor, self._ring, op)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank."""
        return ring.all_gather(tensor, self._channel)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here."""
        return direct.all_to_all(tensor, self._channel)


def _locations(channel: P2PChannel) -> list[RankLocation]:
    """Return the locations of the ranks; measure which hosts are near each other where no switch is known."""
    locations = find_locations(channel)
    groups = hosts(locations)
    if not 2 < len(groups) <= _MEASURABLE or any(location.switch for location in locations):
        return locations
    leaders = [group[0] for group in groups]
    group_here = torch.tensor([-1])
    if channel.rank in leaders:
        hosts_near = near_groups(measure_links(channel.subgroup(leaders), nbytes=_PROBE_BYTES, rounds=3))
        group_here[0] = next(number for number, near in enumerate(hosts_near) if leaders.index(channel.rank) in near)
    cluster_of = ring.all_gather(group_here.to(channel.device), channel).flatten().tolist()
    clusters: dict[int, list[int]] = {}
    for group in groups:
        clusters.setdefault(cluster_of[group[0]], []).extend(group)
    return with_switches(locations, list(clusters.values()))
