"""Direct gather, scatter, all-to-all and barrier: each message goes straight to its receiver."""

from __future__ import annotations

import torch

from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.chunks import chunks, flatten, sendrecv, split, start_collective, write_back
from phalanx.comm.collectives.mismatch import start_check
from phalanx.errors import CommunicationError, UsageError


def gather(tensor: torch.Tensor, channel: P2PChannel, root: int = 0) -> torch.Tensor | None:
    """Return the tensors of all ranks on `root`, stacked by rank; None on the others, each of which sends S."""
    contiguous = start_collective(f"gather to {root}", tensor, channel)
    if channel.rank != root:
        for handle in [channel.send(chunk, root) for chunk in chunks(contiguous, channel)]:
            handle.wait()
        return None
    gathered = contiguous.new_empty(channel.size * contiguous.numel())
    blocks = split(gathered, channel.size)
    blocks[root].copy_(contiguous)
    arrivals = [
        channel.receive(chunk, rank)
        for rank in range(channel.size)
        if rank != root
        for chunk in chunks(blocks[rank], channel)
    ]
    for arrival in arrivals:
        arrival.wait()
    return gathered.view(channel.size, *tensor.shape).to(tensor.device)


def scatter(tensor: torch.Tensor, channel: P2PChannel, source: torch.Tensor | None = None, root: int = 0) -> None:
    """Fill each rank's tensor with its row of `source`, which the root gives: row r for rank r. It sends (n-1) S."""
    if channel.rank == root and (mistake := _mistake(source, tensor, channel)):
        start_check(channel, f"scatter from {root} of {mistake}")  # differs from the other ranks, so all raise
        channel.finish_check()
        raise CommunicationError(f"scatter from {root} of {mistake}", hint="Stack one tensor per rank on the root.")
    contiguous = start_collective(f"scatter from {root}", tensor, channel)
    if channel.rank != root:
        for handle in [channel.receive(chunk, root) for chunk in chunks(contiguous, channel)]:
            handle.wait()
        write_back(contiguous, tensor)
        return
    assert source is not None, "a missing source is a mistake"
    rows = split(flatten(source, channel), channel.size)
    departures = [
        channel.send(chunk, rank)
        for rank in range(channel.size)
        if rank != root
        for chunk in chunks(rows[rank], channel)
    ]
    tensor.detach().copy_(rows[root].view(tensor.shape))
    for departure in departures:
        departure.wait()


def all_to_all(tensor: torch.Tensor, channel: P2PChannel) -> torch.Tensor:
    """Send row r to rank r, and return the rows that were sent here, by rank. A rank sends (n-1)/n of its tensor.

    In round k a rank sends to the one k further and receives from the one k behind, so links are used evenly.
    """
    contiguous = start_collective("all_to_all", tensor, channel)
    if tensor.dim() == 0 or tensor.shape[0] != channel.size:
        channel.finish_check()
        raise UsageError(
            f"all_to_all of a tensor of shape {tuple(tensor.shape)} on {channel.size} ranks",
            hint=f"Give one row per rank: a first dimension of {channel.size}.",
        )
    received = contiguous.new_empty(contiguous.numel())
    rows, targets = split(contiguous, channel.size), split(received, channel.size)
    targets[channel.rank].copy_(rows[channel.rank])
    for shift in range(1, channel.size):
        to, source = (channel.rank + shift) % channel.size, (channel.rank - shift) % channel.size
        sendrecv(rows[to], targets[source], to, source, channel)
    return received.view(tensor.shape).to(tensor.device)


def barrier(channel: P2PChannel) -> None:
    """Return when every rank has called it: after log2(n) rounds each rank has a message from all others."""
    start_check(channel, "barrier", always=True)
    channel.finish_check()


def _mistake(source: torch.Tensor | None, tensor: torch.Tensor, channel: P2PChannel) -> str:
    """Return what is wrong with the source of a scatter; an empty string where it is correct."""
    if source is None:
        return "nothing, where a source is needed"
    shape = (channel.size, *tensor.shape)
    if source.shape == shape and source.dtype == tensor.dtype:
        return ""
    return f"{tuple(source.shape)} {source.dtype}, where {shape} {tensor.dtype} is needed"
