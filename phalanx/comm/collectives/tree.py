"""The binary tree: log2(n) hops instead of the ring's n, for small tensors, where latency dominates.

Counted from the root, rank v has the children 2v + 1 and 2v + 2. Values are combined towards the root and the result is
broadcast back, chunk by chunk, so that all levels work at the same time on a large tensor:

            0
          1   2        a rank sends S up (the root does not) and S down to each child
         3 4 5 6
"""

from __future__ import annotations

import torch

from phalanx.comm.collectives.channel import Handle, P2PChannel
from phalanx.comm.collectives.chunks import RecvBuffers, chunks, start_collective, start_reduction, write_back
from phalanx.comm.reduction import Reduction


def all_reduce(tensor: torch.Tensor, channel: P2PChannel, op: str = "sum") -> None:
    """Combine a tensor over all ranks, in place."""
    flat, reduction = start_reduction("tree all_reduce", tensor, channel, op)
    climb(flat, channel, reduction)
    if channel.rank == 0:
        reduction.finish(flat, channel.size)
    descend(flat, channel)
    write_back(flat, tensor)


def reduce(tensor: torch.Tensor, channel: P2PChannel, op: str = "sum", root: int = 0) -> None:
    """Combine a tensor over all ranks, in place on `root`; the others keep theirs."""
    flat, reduction = start_reduction(f"reduce to {root}", tensor, channel, op)
    if channel.rank != root:
        climb(flat.clone(), channel, reduction, root)
        return
    climb(flat, channel, reduction, root)
    reduction.finish(flat, channel.size)
    write_back(flat, tensor)


def broadcast(tensor: torch.Tensor, channel: P2PChannel, root: int = 0) -> None:
    """Give every rank the values that `root` has, in place."""
    flat = start_collective(f"broadcast from {root}", tensor, channel)
    descend(flat, channel, root)
    if channel.rank != root:
        write_back(flat, tensor)


def climb(flat: torch.Tensor, channel: P2PChannel, reduction: Reduction, root: int = 0) -> None:
    """Combine towards the root, in place; each rank's tensor then has the total of its branch."""
    parent, children = relatives(channel.rank, channel.size, root)
    parts = chunks(flat, channel)
    buffers = [RecvBuffers(parts, child, channel, index, len(children)) for index, child in enumerate(children)]
    departures: list[Handle] = []
    for number, part in enumerate(parts):
        for buffer in buffers:
            reduction.combine(part, buffer.take(number))
        if parent is not None:
            departures.append(channel.send(part, parent))
    for departure in departures:
        departure.wait()


def descend(flat: torch.Tensor, channel: P2PChannel, root: int = 0) -> None:
    """Broadcast from the root, in place."""
    parent, children = relatives(channel.rank, channel.size, root)
    parts = chunks(flat, channel)
    arrivals = [] if parent is None else [channel.receive(part, parent) for part in parts]
    departures: list[Handle] = []
    for number, part in enumerate(parts):
        if parent is not None:
            arrivals[number].wait()
        departures += [channel.send(part, child) for child in children]
    for departure in departures:
        departure.wait()


def relatives(rank: int, size: int, root: int = 0) -> tuple[int | None, list[int]]:
    """Return a rank's parent (the root has none) and its children."""
    node = (rank - root) % size
    parent = None if node == 0 else ((node - 1) // 2 + root) % size
    return parent, [(child + root) % size for child in (2 * node + 1, 2 * node + 2) if child < size]
