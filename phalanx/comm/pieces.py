"""Cutting tensors into the parts that travel: a block for each rank, chunks of a block that follow each other."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from phalanx.comm.reduction import Reduction, find_reduction
from phalanx.comm.signature import ask, describe
from phalanx.comm.wire import CHUNK_BYTES, Wire
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def begin(
    collective: str,
    tensor: torch.Tensor,
    wire: Wire,
    op: str | None = None,
    first: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """Ask whether all ranks mean the same, and return the tensor as it can travel: see `flatten`.

    `first` returns the part that goes to the next rank at once: see `ask`.
    """
    flat = flatten(tensor, wire)
    ask(wire, describe(collective, tensor, op), inline=None if first is None else first(flat))
    if tensor.numel() == 0:
        wire.settle()  # no data will be waited for
    return flat


def begin_reduction(
    collective: str,
    tensor: torch.Tensor,
    wire: Wire,
    op: str,
    first: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, Reduction]:
    """Begin a collective that combines values; an operation that such values do not have is refused."""
    flat = begin(collective, tensor, wire, op, first)
    try:
        return flat, find_reduction(op, tensor.dtype)
    except UsageError:
        wire.settle()  # the others may mean something else: that is the error to tell, and to tell to all
        raise


def flatten(tensor: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return the values in one run of memory that the wire can read: the tensor's own where it is such, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().to(wire.device)
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


def chunk_count(nbytes: int, wire: Wire) -> int:
    """Return in how many chunks to send so many bytes. nccl cuts messages up by itself."""
    return 1 if wire.is_batched else max(1, -(-nbytes // CHUNK_BYTES))


def chunks(flat: torch.Tensor, wire: Wire) -> list[torch.Tensor]:
    """Cut a tensor into the chunks in which it travels; never none, so that loops over peers keep step."""
    return split(flat, chunk_count(flat.nbytes, wire))


def swap(out: torch.Tensor, into: torch.Tensor, to: int, source: int, wire: Wire) -> None:
    """Send one tensor while another arrives."""
    incoming, outgoing = chunks(into, wire), chunks(out, wire)
    arrivals = [wire.receive(chunk, source) for chunk in incoming]
    departures = [wire.send(chunk, to) for chunk in outgoing]
    for handle in [*arrivals, *departures]:
        handle.wait()
