"""Recursive halving and doubling: the ring's bytes in log2(n) exchanges instead of 2 (n-1).

With p ranks, a power of two, a rank first exchanges with the one p/2 away. Each keeps one half of the tensor and adds
the other's values to it; then p/4 away with a quarter, and so on down to its own block. The second phase doubles what
a rank has in each exchange. Rank 5 of 8:

    peer         1         7         4     |     4         7         1
    keeps     [4 5 6 7]  [4 5]      [5]    |   [4 5]   [4 5 6 7]   [all]
    sends     [0 1 2 3]  [6 7]      [4]    |    [5]      [4 5]   [4 5 6 7]

Sent: S - |block r| in the first phase, and in the second the blocks held before each step: 2 (p-1)/p of the data when
p divides it. When n is not a power of two, a rank r >= p first sends its values to rank r - p, which adds them to its
own and sends the result back at the end: both send S once more.
"""

from __future__ import annotations

import torch

from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.chunks import RecvBuffers, bounds, chunks, sendrecv, start_reduction, write_back
from phalanx.comm.collectives.tree import climb, descend
from phalanx.comm.reduction import Reduction


def all_reduce(tensor: torch.Tensor, channel: P2PChannel, op: str = "sum") -> None:
    """Combine a tensor over all ranks, in place."""
    flat, reduction = start_reduction("halving-doubling all_reduce", tensor, channel, op)
    power = 1 << (channel.size.bit_length() - 1)
    pair = None  # the channel between a rank r >= power and rank r - power, on both of them
    if channel.rank >= power:
        pair = channel.subgroup([channel.rank - power, channel.rank])
    elif channel.rank < channel.size - power:
        pair = channel.subgroup([channel.rank, channel.rank + power])
    if pair is not None:
        climb(flat, pair, reduction)
    if channel.rank < power:
        halve_and_double(flat, channel.subgroup(range(power)), reduction, ranks=channel.size)
    if pair is not None:
        descend(flat, pair)
    write_back(flat, tensor)


def halve_and_double(flat: torch.Tensor, channel: P2PChannel, reduction: Reduction, *, ranks: int) -> None:
    """Combine over a power of two of ranks, in place; `ranks`: how many the values are from (for a mean)."""
    edges = bounds(flat.numel(), channel.size)
    low, high = 0, channel.size
    distance = channel.size // 2
    while distance:
        middle = low + distance
        is_lower = channel.rank < middle
        kept_range, given_range = ((low, middle), (middle, high)) if is_lower else ((middle, high), (low, middle))
        out, into = (flat[edges[first] : edges[last]] for first, last in (given_range, kept_range))
        _swap_and_combine(out, into, channel.rank ^ distance, channel, reduction)
        low, high = kept_range
        distance //= 2
    reduction.finish(flat[edges[low] : edges[high]], ranks)
    distance = 1
    while distance < channel.size:
        peer = channel.rank ^ distance
        ours, given_by_peer = (rank // distance * distance for rank in (channel.rank, peer))
        out, into = (flat[edges[first] : edges[first + distance]] for first in (ours, given_by_peer))
        sendrecv(out, into, peer, peer, channel)
        distance *= 2


def _swap_and_combine(
    out: torch.Tensor, into: torch.Tensor, peer: int, channel: P2PChannel, reduction: Reduction
) -> None:
    """Send one part to a peer and combine the other with what it sends, each chunk when it arrives."""
    targets = chunks(into, channel)
    buffers = RecvBuffers(targets, peer, channel)
    departures = [channel.send(chunk, peer) for chunk in chunks(out, channel)]
    for number, target in enumerate(targets):
        reduction.combine(target, buffers.take(number))
    for departure in departures:
        departure.wait()
