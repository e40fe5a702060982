"""Splitting tensors into blocks (one per rank) and chunks, and the receive buffers that chunks arrive in."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from phalanx.comm.collectives.channel import CHUNK_BYTES, Handle, P2PChannel
from phalanx.comm.collectives.mismatch import describe, start_check
from phalanx.comm.collectives.reduction import Reduction, find_reduction
from phalanx.errors import UsageError


def start_collective(
    collective: str,
    tensor: torch.Tensor,
    channel: P2PChannel,
    op: str | None = None,
    first: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """Ask whether all ranks mean the same, and return the tensor as it can travel: see `flatten`.

    `first` returns the part that goes to the next rank at once: see `ask`.
    """
    flat = flatten(tensor, channel)
    start_check(channel, describe(collective, tensor, op), inline=None if first is None else first(flat))
    if tensor.numel() == 0:
        channel.settle()  # no data will be waited for
    return flat


def start_reduction(
    collective: str,
    tensor: torch.Tensor,
    channel: P2PChannel,
    op: str,
    first: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, Reduction]:
    """Begin a collective that combines values; an operation that such values do not have is refused."""
    flat = start_collective(collective, tensor, channel, op, first)
    try:
        return flat, find_reduction(op, tensor.dtype)
    except UsageError:
        channel.settle()  # the others may mean something else: that is the error to tell, and to tell to all
        raise


def flatten(tensor: torch.Tensor, channel: P2PChannel) -> torch.Tensor:
    """Return the values in one run of memory that the wire can read: the tensor's own where it is such, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().to(channel.device)
    return plain.contiguous().view(-1)


def write_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Put the values where they belong, unless `flat` is the tensor's own memory."""
    if flat.numel() and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def bounds(length: int, parts: int) -> list[int]:
    """Return where `parts` nearly equal parts begin, and the end: the first `length % parts` are longer by one."""
    base, longer = divmod(length, parts)
    return [part * base + min(part, longer) for part in range(parts + 1)]


def split(flat: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Cut a tensor into nearly equal views."""
    if parts == 1:
        return [flat]
    return [flat[low:high] for low, high in pairwise(bounds(flat.numel(), parts))]


def chunk_count(nbytes: int, channel: P2PChannel) -> int:
    """Return in how many chunks to send so many bytes. nccl cuts messages up by itself."""
    return 1 if channel.is_batched else max(1, -(-nbytes // CHUNK_BYTES))


def chunks(flat: torch.Tensor, channel: P2PChannel) -> list[torch.Tensor]:
    """Cut a tensor into the chunks in which it travels; never none, so that loops over peers keep step."""
    return split(flat, chunk_count(flat.nbytes, channel))


def sendrecv(out: torch.Tensor, into: torch.Tensor, to: int, source: int, channel: P2PChannel) -> None:
    """Send one tensor while another arrives."""
    incoming, outgoing = chunks(into, channel), chunks(out, channel)
    arrivals = [channel.receive(chunk, source) for chunk in incoming]
    departures = [channel.send(chunk, to) for chunk in outgoing]
    for handle in [*arrivals, *departures]:
        handle.wait()


class RecvBuffers:
    """The chunks that one peer sends, shaped as `parts`, in their order. It is number `place` of `total` at once."""

    def __init__(
        self, parts: list[torch.Tensor], peer: int, channel: P2PChannel, place: int = 0, total: int = 1
    ) -> None:
        self._parts, self._peer, self._wire = parts, peer, channel
        longest = parts[0].numel()
        slots = min(channel.depth, len(parts))
        memory = channel.scratch(total * slots * longest, parts[0])
        self._slots = split(split(memory, total)[place], slots)
        self._arrivals = [self._expect(number) for number in range(slots)]

    def take(self, number: int) -> torch.Tensor:
        """Return a chunk, once it is here. Chunks are taken in order; one is valid until the next is taken."""
        if number:
            self._refill(number - 1)
        self._arrivals[number % len(self._slots)].wait()
        return self._place(number)

    def _refill(self, number: int) -> None:
        later = number + len(self._slots)
        if later < len(self._parts):
            self._arrivals[number % len(self._slots)] = self._expect(later)

    def _expect(self, number: int) -> Handle:
        return self._wire.receive(self._place(number), self._peer)

    def _place(self, number: int) -> torch.Tensor:
        return self._slots[number % len(self._slots)][: self._parts[number].numel()]
