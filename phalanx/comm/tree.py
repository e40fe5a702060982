"""The binary tree: log2(n) hops instead of the ring's n, for tensors so small that hops are what costs.

Counted from the root, rank v has the children 2v + 1 and 2v + 2. Values are combined on the way up and the result is
handed down, chunk by chunk, so that all levels work at once on a large tensor:

            0
          1   2        a rank sends S up (the root does not) and S down to each child
         3 4 5 6
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.comm.landing import Landing
from phalanx.comm.pieces import begin, begin_reduction, chunks, write_back

if TYPE_CHECKING:
    import torch

    from phalanx.comm.reduction import Reduction
    from phalanx.comm.wire import Handle, Wire


def all_reduce(tensor: torch.Tensor, wire: Wire, op: str = "sum") -> None:
    """Combine a tensor over all ranks, in place."""
    flat, reduction = begin_reduction("tree all_reduce", tensor, wire, op)
    climb(flat, wire, reduction)
    if wire.rank == 0:
        reduction.finish(flat, wire.size)
    descend(flat, wire)
    write_back(flat, tensor)


def reduce(tensor: torch.Tensor, wire: Wire, op: str = "sum", root: int = 0) -> None:
    """Combine a tensor over all ranks, in place on `root`; on the others it stays as it is."""
    flat, reduction = begin_reduction(f"reduce to {root}", tensor, wire, op)
    if wire.rank != root:
        climb(flat.clone(), wire, reduction, root)
        return
    climb(flat, wire, reduction, root)
    reduction.finish(flat, wire.size)
    write_back(flat, tensor)


def broadcast(tensor: torch.Tensor, wire: Wire, root: int = 0) -> None:
    """Give every rank the values that `root` has, in place."""
    flat = begin(f"broadcast from {root}", tensor, wire)
    descend(flat, wire, root)
    if wire.rank != root:
        write_back(flat, tensor)


def climb(flat: torch.Tensor, wire: Wire, reduction: Reduction, root: int = 0) -> None:
    """Combine towards the root, in place; every rank's memory then holds the total of its branch."""
    parent, children = relatives(wire.rank, wire.size, root)
    parts = chunks(flat, wire)
    landings = [Landing(parts, child, wire, place, len(children)) for place, child in enumerate(children)]
    departures: list[Handle] = []
    for number, part in enumerate(parts):
        for landing in landings:
            reduction.combine(part, landing.take(number))
        if parent is not None:
            departures.append(wire.send(part, parent))
    for departure in departures:
        departure.wait()


def descend(flat: torch.Tensor, wire: Wire, root: int = 0) -> None:
    """Hand down what the root has, in place."""
    parent, children = relatives(wire.rank, wire.size, root)
    parts = chunks(flat, wire)
    arrivals = [] if parent is None else [wire.receive(part, parent) for part in parts]
    departures: list[Handle] = []
    for number, part in enumerate(parts):
        if parent is not None:
            arrivals[number].wait()
        departures += [wire.send(part, child) for child in children]
    for departure in departures:
        departure.wait()


def relatives(rank: int, size: int, root: int = 0) -> tuple[int | None, list[int]]:
    """Return a rank's parent (the root has none) and its children."""
    place = (rank - root) % size
    parent = None if place == 0 else ((place - 1) // 2 + root) % size
    return parent, [(child + root) % size for child in (2 * place + 1, 2 * place + 2) if child < size]
