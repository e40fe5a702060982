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

from typing import TYPE_CHECKING

from phalanx.comm.landing import Landing
from phalanx.comm.pieces import begin_reduction, bounds, chunks, swap, write_back
from phalanx.comm.tree import climb, descend

if TYPE_CHECKING:
    import torch

    from phalanx.comm.reduction import Reduction
    from phalanx.comm.wire import Wire


def all_reduce(tensor: torch.Tensor, wire: Wire, op: str = "sum") -> None:
    """Combine a tensor over all ranks, in place."""
    flat, reduction = begin_reduction("halving-doubling all_reduce", tensor, wire, op)
    power = 1 << (wire.size.bit_length() - 1)
    folded = wire.size - power
    pair = _pair(wire, power, folded)
    if pair is not None:
        climb(flat, pair, reduction)
    if wire.rank < power:
        halve_and_double(flat, wire.among(range(power)), reduction, ranks=wire.size)
    if pair is not None:
        descend(flat, pair)
    write_back(flat, tensor)


def _pair(wire: Wire, power: int, folded: int) -> Wire | None:
    """Return the wire between a rank that is one too many and the rank that speaks for it, on both of them."""
    if wire.rank >= power:
        return wire.among([wire.rank - power, wire.rank])
    if wire.rank < folded:
        return wire.among([wire.rank, wire.rank + power])
    return None


def halve_and_double(flat: torch.Tensor, wire: Wire, reduction: Reduction, *, ranks: int) -> None:
    """Combine over a power of two of ranks, in place; `ranks` is how many stand behind them (for a mean)."""
    edges = bounds(flat.numel(), wire.size)
    low, high = 0, wire.size
    distance = wire.size // 2
    while distance:
        middle = low + distance
        is_lower = wire.rank < middle
        kept, given = ((low, middle), (middle, high)) if is_lower else ((middle, high), (low, middle))
        out, into = (flat[edges[first] : edges[last]] for first, last in (given, kept))
        _swap_and_combine(out, into, wire.rank ^ distance, wire, reduction)
        low, high = kept
        distance //= 2
    reduction.finish(flat[edges[low] : edges[high]], ranks)
    _double(flat, edges, wire)


def _swap_and_combine(out: torch.Tensor, into: torch.Tensor, peer: int, wire: Wire, reduction: Reduction) -> None:
    """Send one part to a peer and combine the other with what it sends, each chunk as soon as it is here."""
    targets = chunks(into, wire)
    landing = Landing(targets, peer, wire)
    departures = [wire.send(chunk, peer) for chunk in chunks(out, wire)]
    for number, target in enumerate(targets):
        reduction.combine(target, landing.take(number))
    for departure in departures:
        departure.wait()


def _double(flat: torch.Tensor, edges: list[int], wire: Wire) -> None:
    """Hand on what is held, and be given as much, until all of it is here."""
    distance = 1
    while distance < wire.size:
        peer = wire.rank ^ distance
        held, given = (rank // distance * distance for rank in (wire.rank, peer))
        out, into = (flat[edges[first] : edges[first + distance]] for first in (held, given))
        swap(out, into, peer, peer, wire)
        distance *= 2
