"""Splitting tensors into blocks (one per rank) and chunks, and the receive buffers that chunks arrive in."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from phalanx.comm.collectives.channel import CHUNK_BYTES, Handle, P2PChannel
from phalanx.comm.collectives.mismatch import describe, start_check
from phalanx.comm.reduction import Reduction, find_reduction
from phalanx.errors import UsageError


def start_collective(
    collective: str,
    tensor: torch.Tensor,
    channel: P2PChannel,
    op: str | None = None,
    first: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """Start the check that all ranks do the same, and return the flat tensor.

    `first` returns the part that is sent to the next rank inline (see `start_check`).
    """
    flat = flatten(tensor, channel)
    start_check(channel, describe(collective, tensor, op), inline=None if first is None else first(flat))
    if tensor.numel() == 0:
        channel.finish_check()  # no data will be waited for
    return flat


def start_reduction(
    collective: str,
    tensor: torch.Tensor,
    channel: P2PChannel,
    op: str,
    first: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, Reduction]:
    """Start a collective that combines values; UsageError where the dtype does not have the operation."""
    flat = start_collective(collective, tensor, channel, op, first)
    try:
        return flat, find_reduction(op, tensor.dtype)
    except UsageError:
        channel.finish_check()  # a mismatch between the ranks is the error that all of them must raise
        raise


def flatten(tensor: torch.Tensor, channel: P2PChannel) -> torch.Tensor:
    """Return the values as a flat tensor on the channel's device: a view where possible, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().to(channel.device)
    return plain.contiguous().view(-1)


def write_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the values into the tensor, unless `flat` is a view of it."""
    if flat.numel() and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def bounds(length: int, parts: int) -> list[int]:
    """Return the starts of `parts` nearly equal parts, and the end: the first `length % parts` are longer by one."""
    base, longer = divmod(length, parts)
    return [part * base + min(part, longer) for part in range(parts + 1)]


def split(flat: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Cut a tensor into nearly equal views."""
    if parts == 1:
        return [flat]
    return [flat[low:high] for low, high in pairwise(bounds(flat.numel(), parts))]


def chunk_count(nbytes: int, channel: P2PChannel) -> int:
    """Return the number of chunks for a message of some bytes; nccl splits messages itself."""
    return 1 if channel.is_batched else max(1, -(-nbytes // CHUNK_BYTES))


def chunks(flat: torch.Tensor, channel: P2PChannel) -> list[torch.Tensor]:
    """Cut a tensor into the chunks in which it is sent, at least one, so that loops over peers stay aligned."""
    return split(flat, chunk_count(flat.nbytes, channel))


def sendrecv(out: torch.Tensor, into: torch.Tensor, to: int, source: int, channel: P2PChannel) -> None:
    """Send one tensor while another arrives."""
    incoming, outgoing = chunks(into, channel), chunks(out, channel)
    arrivals = [channel.receive(chunk, source) for chunk in incoming]
    departures = [channel.send(chunk, to) for chunk in outgoing]
    for handle in [*arrivals, *departures]:
        handle.wait()


class RecvBuffers:
    """Receives the chunks that one peer sends, shaped as `parts`; number `position` of `total` such buffers."""

    def __init__(
        self, parts: list[torch.Tensor], peer: int, channel: P2PChannel, position: int = 0, total: int = 1
    ) -> None:
        self._parts, self._peer, self._channel = parts, peer, channel
        slots = min(channel.depth, len(parts))
        memory = channel.scratch(total * slots * parts[0].numel(), parts[0])
        self._slots = split(split(memory, total)[position], slots)
        self._arrivals = [self._expect(number) for number in range(slots)]

    def take(self, number: int) -> torch.Tensor:
        """Return a chunk when it has arrived. Chunks are taken in order; one is valid until the next is taken."""
        slots = len(self._slots)
        later = number - 1 + slots
        if number and later < len(self._parts):  # the chunk before has been used: its slot is free
            self._arrivals[later % slots] = self._expect(later)
        self._arrivals[number % slots].wait()
        return self._slot(number)

    def _expect(self, number: int) -> Handle:
        return self._channel.receive(self._slot(number), self._peer)

    def _slot(self, number: int) -> torch.Tensor:
        return self._slots[number % len(self._slots)][: self._parts[number].numel()]
