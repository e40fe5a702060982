"""The location of each rank (host, NUMA node, switch), and the measured latency and bandwidth between ranks.

Each rank reads its own location from the host name, the kernel and the environment; one all-gather shares it.
`channel.subgroup(ring_order(locations))` is a channel over the ranks in an order that crosses few switches.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import torch

from phalanx.comm.collectives import ring
from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.direct import barrier
from phalanx.comm.shm.pages import machine_id

FAR_RATIO = 2.0
"""A link is far if it takes at least this multiple of the slowest near link's time."""


@dataclass(frozen=True)
class LinkMatrix:
    """For every pair of ranks, the one-way latency of a small message and the bytes per second of large ones."""

    latency_s: list[list[float]]
    bandwidth: list[list[float]]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.latency_s)

    def seconds(self, first: int, second: int, nbytes: int = 1 << 20) -> float:
        """Return the time of a message between two ranks."""
        return max(self.latency_s[first][second], nbytes / self.bandwidth[first][second])


def measure_links(channel: P2PChannel, *, nbytes: int = 4 << 20, rounds: int = 10) -> LinkMatrix:
    """Measure every pair by ping-pong, one pair at a time while the others wait; every rank calls it."""
    small = torch.zeros(1, dtype=torch.uint8, device=channel.device)
    large = torch.zeros(nbytes, dtype=torch.uint8, device=channel.device)
    measured = torch.zeros(2, channel.size, dtype=torch.float64)
    for first, second in combinations(range(channel.size), 2):
        barrier(channel)
        if channel.rank in (first, second):
            peer = first + second - channel.rank
            measured[0, peer] = _one_way(small, peer, channel, 2 * rounds)
            measured[1, peer] = nbytes / _one_way(large, peer, channel, rounds)
    every = ring.all_gather(measured, channel)
    for first, second in combinations(range(channel.size), 2):  # both measured it: use the lower rank's values
        every[second, :, first] = every[first, :, second]
    return LinkMatrix(every[:, 0].tolist(), every[:, 1].tolist())


def _one_way(tensor: torch.Tensor, peer: int, channel: P2PChannel, rounds: int) -> float:
    """Return half of the quickest round trip: disturbances only make a message slower."""
    trips = []
    for _ in range(rounds + 1):  # the first one connects
        _synchronize(tensor)
        begin = time.perf_counter()
        if channel.rank < peer:
            channel.send(tensor, peer, is_control=True).wait()
            channel.receive(tensor, peer, is_control=True).wait()
        else:
            channel.receive(tensor, peer, is_control=True).wait()
            channel.send(tensor, peer, is_control=True).wait()
        _synchronize(tensor)
        trips.append(time.perf_counter() - begin)
    return min(trips[1:]) / 2


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def near_groups(matrix: LinkMatrix) -> list[list[int]]:
    """Split the ranks into groups of near ones at the largest jump in link times, where it is at least FAR_RATIO."""
    links = {pair: matrix.seconds(*pair) for pair in combinations(range(matrix.size), 2)}
    jumps = [(slower / faster, faster) for faster, slower in pairwise(sorted(links.values()))]
    ratio, below = max(jumps, default=(0.0, 0.0))
    limit = below if ratio >= FAR_RATIO else float("inf")
    group = list(range(matrix.size))
    for (first, second), seconds in links.items():
        if seconds <= limit:
            old, new = group[second], group[first]
            group = [new if member == old else member for member in group]
    return [[rank for rank in range(matrix.size) if group[rank] == name] for name in dict.fromkeys(group)]


SWITCH_VARIABLE = "PHALANX_SWITCH"
"""The switches above this host where Slurm does not name them, from the core down, such as "spine1.leaf4"."""

_NUMA_NODES = Path("/sys/devices/system/node")
_MESSAGE_BYTES = 2048
_LONGEST_PATH = 1024
_LONGEST_NAME = 512


@dataclass(frozen=True)
class RankLocation:
    """The location of one rank. `numa`: None where it may run on several nodes; `switch`: empty where unknown."""

    rank: int
    host: str
    numa: int | None = None
    switch: tuple[str, ...] = ()


def find_locations(channel: P2PChannel) -> list[RankLocation]:
    """Return the location of each rank; every rank calls it, and only the first call sends anything."""
    cache: dict[tuple[int, ...], list[RankLocation]] = channel.state.locations
    if channel.peers not in cache:
        message = json.dumps(asdict(own_location(channel.rank))).encode().ljust(_MESSAGE_BYTES)
        rows = ring.all_gather(torch.frombuffer(bytearray(message), dtype=torch.uint8), channel)
        locations = [json.loads(bytes(row.numpy())) for row in rows]
        cache[channel.peers] = [RankLocation(**{**fields, "switch": tuple(fields["switch"])}) for fields in locations]
    return cache[channel.peers]


def own_location(rank: int, environment: Mapping[str, str] | None = None) -> RankLocation:
    """Return the location of this process."""
    switch = switch_path(os.environ if environment is None else environment)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return RankLocation(rank, machine_id()[:_LONGEST_NAME], numa_node(cores), switch)


def numa_node(cores: set[int], nodes: Path = _NUMA_NODES) -> int | None:
    """Return the NUMA node that holds all these cores, or None."""
    for path in sorted(nodes.glob("node[0-9]*/cpulist")):
        if cores <= core_set(path.read_text()):
            return int(path.parent.name.removeprefix("node"))
    return None


def core_set(text: str) -> set[int]:
    """Parse a list of cores as the kernel writes it: `0-3,8,10-11`."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cores |= set(range(int(low), int(high or low) + 1))
    return cores


def switch_path(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the switches above this host, from the core down; Slurm writes them as `s0.s4.node7`."""
    levels = tuple(environment.get("SLURM_TOPOLOGY_ADDR", "")[:_LONGEST_PATH].split("."))
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if "switch" in kinds and len(kinds) == len(levels):
        return tuple(name for name, kind in zip(levels, kinds, strict=True) if kind == "switch")
    named = environment.get(SWITCH_VARIABLE, "")[:_LONGEST_PATH]
    return tuple(named.split(".")) if named else ()


def hosts(locations: Sequence[RankLocation]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first rank."""
    ranks_of_host: dict[str, list[int]] = {}
    for location in locations:
        ranks_of_host.setdefault(location.host, []).append(location.rank)
    return list(ranks_of_host.values())


def ring_order(locations: Sequence[RankLocation]) -> list[int]:
    """Return the ranks in an order that keeps those of a NUMA node, a host and a switch together.

    Otherwise they stay in the order of the ranks.
    """
    paths: dict[int, tuple[object, ...]] = {
        location.rank: (*location.switch, location.host, location.numa) for location in locations
    }
    first_rank: dict[tuple[object, ...], int] = {}
    for rank, path in sorted(paths.items()):
        for depth in range(len(path) + 1):
            first_rank.setdefault(path[:depth], rank)
    return sorted(paths, key=lambda rank: ([first_rank[paths[rank][: d + 1]] for d in range(len(paths[rank]))], rank))


def with_switches(locations: Sequence[RankLocation], groups: Sequence[Sequence[int]]) -> list[RankLocation]:
    """Use measured groups of near ranks as switches where no switch is known."""
    number = {rank: f"near{index}" for index, group in enumerate(groups) for rank in group}
    return [one if one.switch else replace(one, switch=(number[one.rank],)) for one in locations]
