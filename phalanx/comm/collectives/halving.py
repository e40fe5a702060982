"""Recursive halving and doubling: the ring's bytes in log2(n) exchanges instead of 2 (n-1).

With p ranks, a power of two, a rank first meets the one p/2 away. Each keeps the half of the tensor on its own side and
adds the other's values to it; then p/4 away with a quarter, and so on down to its own block. The way back doubles what
it holds each time. Rank 5 of 8:

    meets        1         7         4     |     4         7         1
    keeps     [4 5 6 7]  [4 5]      [5]    |   [4 5]   [4 5 6 7]   [all]
    sends     [0 1 2 3]  [6 7]      [4]    |    [5]      [4 5]   [4 5 6 7]

Sent: S - |block r| on the way down, and on the way up the blocks held before each step: 2 (p-1)/p of the data when p
divides it. When n is no power of two, the ranks from p on first add their values to those of rank r - p, and are given
the result at the end: those send S once more, as do their partners.
"""

from __future__ import annotations

import torch

from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.chunks import RecvBuffers, bounds, chunks, sendrecv, start_reduction, write_back
from phalanx.comm.collectives.reduction import Reduction
from phalanx.comm.collectives.tree import climb, descend


def all_reduce(tensor: torch.Tensor, channel: P2PChannel, op: str = "sum") -> None:
    """Combine a tensor over all ranks, in place."""
    flat, reduction = start_reduction("halving-doubling all_reduce", tensor, channel, op)
    power = 1 << (channel.size.bit_length() - 1)
    folded = channel.size - power
    pair = _pair(channel, power, folded)
    if pair is not None:
        climb(flat, pair, reduction)
    if channel.rank < power:
        halve_and_double(flat, channel.subgroup(range(power)), reduction, ranks=channel.size)
    if pair is not None:
        descend(flat, pair)
    write_back(flat, tensor)


def _pair(channel: P2PChannel, power: int, folded: int) -> P2PChannel | None:
    """Return the wire between a rank that is one too many and the rank that speaks for it, on both of them."""
    if channel.rank >= power:
        return channel.subgroup([channel.rank - power, channel.rank])
    if channel.rank < folded:
        return channel.subgroup([channel.rank, channel.rank + power])
    return None


def halve_and_double(flat: torch.Tensor, channel: P2PChannel, reduction: Reduction, *, ranks: int) -> None:
    """Combine over a power of two of ranks, in place; `ranks` is how many stand behind them (for a mean)."""
    edges = bounds(flat.numel(), channel.size)
    low, high = 0, channel.size
    distance = channel.size // 2
    while distance:
        middle = low + distance
        is_lower = channel.rank < middle
        kept, given = ((low, middle), (middle, high)) if is_lower else ((middle, high), (low, middle))
        out, into = (flat[edges[first] : edges[last]] for first, last in (given, kept))
        _swap_and_combine(out, into, channel.rank ^ distance, channel, reduction)
        low, high = kept
        distance //= 2
    reduction.finish(flat[edges[low] : edges[high]], ranks)
    _double(flat, edges, channel)


def _swap_and_combine(
    out: torch.Tensor, into: torch.Tensor, peer: int, channel: P2PChannel, reduction: Reduction
) -> None:
    """Send one part to a peer and combine the other with what it sends, each chunk as soon as it is here."""
    targets = chunks(into, channel)
    landing = RecvBuffers(targets, peer, channel)
    departures = [channel.send(chunk, peer) for chunk in chunks(out, channel)]
    for number, target in enumerate(targets):
        reduction.combine(target, landing.take(number))
    for departure in departures:
        departure.wait()


def _double(flat: torch.Tensor, edges: list[int], channel: P2PChannel) -> None:
    """Hand on what is held, and be given as much, until all of it is here."""
    distance = 1
    while distance < channel.size:
        peer = channel.rank ^ distance
        held, given = (rank // distance * distance for rank in (channel.rank, peer))
        out, into = (flat[edges[first] : edges[first + distance]] for first in (held, given))
        sendrecv(out, into, peer, peer, channel)
        distance *= 2
