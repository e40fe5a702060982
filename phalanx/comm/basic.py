"""The plain ones: gather, scatter, all-to-all and barrier, where every message goes straight to whom it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.comm.pieces import begin, chunks, flatten, split, swap, write_back
from phalanx.comm.signature import ask
from phalanx.errors import CommunicationError, UsageError

if TYPE_CHECKING:
    import torch

    from phalanx.comm.wire import Wire


def gather(tensor: torch.Tensor, wire: Wire, root: int = 0) -> torch.Tensor | None:
    """Return the tensors of all ranks on `root`, stacked by rank; None on the others, each of which sends S."""
    own = begin(f"gather to {root}", tensor, wire)
    if wire.rank != root:
        for handle in [wire.send(chunk, root) for chunk in chunks(own, wire)]:
            handle.wait()
        return None
    gathered = own.new_empty(wire.size * own.numel())
    blocks = split(gathered, wire.size)
    blocks[root].copy_(own)
    arrivals = [
        wire.receive(chunk, rank) for rank in range(wire.size) if rank != root for chunk in chunks(blocks[rank], wire)
    ]
    for arrival in arrivals:
        arrival.wait()
    return gathered.view(wire.size, *tensor.shape).to(tensor.device)


def scatter(tensor: torch.Tensor, wire: Wire, source: torch.Tensor | None = None, root: int = 0) -> None:
    """Fill each rank's tensor with its row of `source`, which the root gives: row r for rank r. It sends (n-1) S."""
    if wire.rank == root and (mistake := _mistake(source, tensor, wire)):
        ask(wire, f"scatter from {root} of {mistake}")  # the others do not say this, so all ranks raise
        wire.settle()
        raise CommunicationError(f"scatter from {root} of {mistake}", hint="Stack one tensor a rank on the root.")
    own = begin(f"scatter from {root}", tensor, wire)
    if wire.rank != root:
        for handle in [wire.receive(chunk, root) for chunk in chunks(own, wire)]:
            handle.wait()
        write_back(own, tensor)
        return
    assert source is not None, "a missing source is a mistake"
    rows = split(flatten(source, wire), wire.size)
    departures = [
        wire.send(chunk, rank) for rank in range(wire.size) if rank != root for chunk in chunks(rows[rank], wire)
    ]
    tensor.detach().copy_(rows[root].view(tensor.shape))
    for departure in departures:
        departure.wait()


def all_to_all(tensor: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Send row r to rank r, and return the rows that were sent here, by rank. A rank sends (n-1)/n of its tensor.

    In round k a rank sends to the one k further and receives from the one k behind: nobody is asked by two at once.
    """
    own = begin("all_to_all", tensor, wire)
    if tensor.dim() == 0 or tensor.shape[0] != wire.size:
        wire.settle()
        raise UsageError(
            f"all_to_all of a tensor of shape {tuple(tensor.shape)} on {wire.size} ranks",
            hint=f"Give one row for each rank: a first dimension of {wire.size}.",
        )
    received = own.new_empty(own.numel())
    rows, places = split(own, wire.size), split(received, wire.size)
    places[wire.rank].copy_(rows[wire.rank])
    for shift in range(1, wire.size):
        to, source = (wire.rank + shift) % wire.size, (wire.rank - shift) % wire.size
        swap(rows[to], places[source], to, source, wire)
    return received.view(tensor.shape).to(tensor.device)


def barrier(wire: Wire) -> None:
    """Return when every rank has called it: in log2(n) rounds each rank has heard of all others."""
    ask(wire, "barrier", always=True)
    wire.settle()


def _mistake(source: torch.Tensor | None, tensor: torch.Tensor, wire: Wire) -> str:
    """Say what is wrong with the source of a scatter; nothing when all is well."""
    if source is None:
        return "nothing, where a source is needed"
    wanted = (wire.size, *tensor.shape)
    if source.shape == wanted and source.dtype == tensor.dtype:
        return ""
    return f"{tuple(source.shape)} {source.dtype}, where {wanted} {tensor.dtype} is needed"
