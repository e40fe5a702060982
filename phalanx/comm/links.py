"""What links between ranks can do: latency and bandwidth of every pair, measured, and what follows from it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import torch

from phalanx.comm import ring
from phalanx.comm.basic import barrier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.comm.wire import Wire

FAR_RATIO = 2.0
"""A link is far when it takes at least so many times as long as the slowest of the near ones."""


@dataclass(frozen=True)
class LinkMatrix:
    """For every pair of ranks: seconds that the smallest message takes one way, and bytes a second of large ones.

    Symmetric, for each number comes from a ping and a pong; the diagonal is zero.
    """

    latency_s: list[list[float]]
    bandwidth: list[list[float]]

    @property
    def size(self) -> int:
        """How many ranks it is about."""
        return len(self.latency_s)

    def seconds(self, first: int, second: int, nbytes: int = 1 << 20) -> float:
        """Return how long so many bytes take between two ranks."""
        return max(self.latency_s[first][second], nbytes / self.bandwidth[first][second])


def measure_links(wire: Wire, *, nbytes: int = 4 << 20, rounds: int = 10) -> LinkMatrix:
    """Measure every pair by ping-pong, one pair at a time while the others wait; every rank calls it."""
    small = torch.zeros(1, dtype=torch.uint8, device=wire.device)
    large = torch.zeros(nbytes, dtype=torch.uint8, device=wire.device)
    own = torch.zeros(2, wire.size, dtype=torch.float64)
    for first, second in combinations(range(wire.size), 2):
        barrier(wire)
        if wire.rank in (first, second):
            peer = first + second - wire.rank
            own[0, peer] = _one_way(small, peer, wire, 2 * rounds)
            own[1, peer] = nbytes / _one_way(large, peer, wire, rounds)
    every = ring.all_gather(own, wire)
    for first, second in combinations(range(wire.size), 2):  # both measured it: take the lower rank's word
        every[second, :, first] = every[first, :, second]
    return LinkMatrix(every[:, 0].tolist(), every[:, 1].tolist())


def _one_way(tensor: torch.Tensor, peer: int, wire: Wire, rounds: int) -> float:
    """Return half of the quickest round trip: what disturbs a message only ever makes it slower."""
    trips = []
    for _ in range(rounds + 1):  # the first one connects
        _settle(tensor)
        begin = time.perf_counter()
        if wire.rank < peer:
            wire.send(tensor, peer, is_control=True).wait()
            wire.receive(tensor, peer, is_control=True).wait()
        else:
            wire.receive(tensor, peer, is_control=True).wait()
            wire.send(tensor, peer, is_control=True).wait()
        _settle(tensor)
        trips.append(time.perf_counter() - begin)
    return min(trips[1:]) / 2


def _settle(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def near_groups(matrix: LinkMatrix) -> list[list[int]]:
    """Split the ranks into groups of near ones, at the widest gap between links' times; one group if none."""
    links = {pair: matrix.seconds(*pair) for pair in combinations(range(matrix.size), 2)}
    limit = _widest_gap(sorted(links.values()))
    group = list(range(matrix.size))
    for (first, second), seconds in links.items():
        if seconds <= limit:
            old, new = group[second], group[first]
            group = [new if member == old else member for member in group]
    return [[rank for rank in range(matrix.size) if group[rank] == name] for name in dict.fromkeys(group)]


def _widest_gap(times: Sequence[float]) -> float:
    """Return the time below the largest jump, or infinity when no jump is as large as `FAR_RATIO`."""
    if len(times) < 2:
        return float("inf")
    ratio, below = max((slower / faster, faster) for faster, slower in pairwise(times))
    return below if ratio >= FAR_RATIO else float("inf")
