"""Time of collectives: from a link's measured curve over message sizes, and where the ranks of a group are."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from phalanx.tools.plan.cluster import Link

VOLUME = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""How often a rank sends its share (n-1)/n of the data: bus bandwidth is this x bytes x (n-1)/n / time (nccl-tests)."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many of them share a machine."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Machines over which the group is spread."""
        return -(-self.size // self.per_node)


def group_of(size: int, stride: int, gpus_per_node: int) -> Group:
    """Return the group of an axis whose neighbours are `stride` ranks apart, with ranks in order on the machines."""
    return Group(size, max(1, min(size, gpus_per_node // stride)))


@lru_cache(maxsize=65536)
def collective_seconds(kind: str, size: float, group: Group, intra: Link, inter: Link) -> float:
    """Return the time of a collective over `size` bytes: the whole tensor, before an all-reduce or after a gather.

    Within a machine each GPU has the bandwidth of the link. Between machines the ranks of a group that share a machine
    share its adapters: a ring enters and leaves each machine on all of them.
    """
    if group.size == 1:
        return 0.0
    moved = VOLUME[kind] * size * (group.size - 1) / group.size
    if group.nodes == 1:
        return max(intra.latency_us * 1e-6, moved / (intra.gbps * 1e9 * share_at(intra, size)))
    across = inter.gbps * group.per_node
    if kind == "all_to_all":  # each rank's own adapter carries what leaves the machine
        across = inter.gbps / max(1e-9, 1 - group.per_node / group.size)
    hops = inter.latency_us * 1e-6 * (math.log2(group.nodes) + 1)
    return hops + moved / (min(intra.gbps, across) * 1e9 * share_at(inter, size))


def send_seconds(size: float, link: Link) -> float:
    """Return the time to send bytes from one rank to another."""
    return link.latency_us * 1e-6 + size / (link.gbps * 1e9)


def share_at(link: Link, size: float) -> float:
    """Return the share of the link's bandwidth at a message size, between the measured points by logarithms."""
    points = link.curve
    if not points:
        return 1.0
    at = bisect_left(points, (size, 0.0))
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1]
    (fewer, low), (more, high) = points[at - 1], points[at]
    part = math.log(size / fewer) / math.log(more / fewer)
    return float(low * (high / low) ** part)


def bus_bandwidth(kind: str, size: float, ranks: int, seconds: float) -> float:
    """Return the bus bandwidth in GB/s of a measured collective, as nccl-tests defines it."""
    return VOLUME[kind] * size * (ranks - 1) / ranks / seconds / 1e9
