"""A gradient made ready to travel: the part that one shard holds, whole or as the rows that are not zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from phalanx.comm.server.frames import bytes_of

if TYPE_CHECKING:
    from phalanx.comm.server.placement import Piece


@dataclass
class Part:
    """Gradient of one piece. `rows` names them where not all travel."""

    index: int
    values: torch.Tensor
    rows: torch.Tensor | None = None
    sparse: bool = False
    copied: torch.cuda.Event | None = None
    """When the copy from the GPU, which goes on beside backward, is done."""

    @property
    def count(self) -> int:
        """How many rows travel; -1: all of the piece."""
        return -1 if self.rows is None else self.rows.numel()

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.values.nbytes + (0 if self.rows is None else self.rows.nbytes)

    def arrive(self) -> None:
        """Wait until the values are in the host's memory."""
        if self.copied is not None:
            self.copied.synchronize()

    def buffers(self) -> list[memoryview]:
        """Return the memory to send."""
        return [bytes_of(tensor) for tensor in (self.rows, self.values) if tensor is not None]


def cut_gradient(gradient: torch.Tensor, index: int, piece: Piece, *, find_rows: bool) -> Part:
    """Return a piece's part of a parameter's gradient."""
    if gradient.is_sparse:
        return _sparse_part(gradient.coalesce(), index, piece)
    part = (gradient.detach()[piece.start : piece.stop] if piece.shape else gradient.detach()).contiguous()
    if find_rows and part.ndim > 1:
        rows = part.flatten(1).any(dim=1).nonzero().flatten()
        saved = part.nbytes - rows.numel() * (part.nbytes // part.shape[0] + rows.element_size())
        if saved > 0:
            return Part(index, part[rows].cpu(), rows.cpu())
    return _to_host(part, index)


def _sparse_part(gradient: torch.Tensor, index: int, piece: Piece) -> Part:
    rows, values = gradient.indices()[0], gradient.values()
    here = (rows >= piece.start) & (rows < piece.stop)
    return Part(index, values[here].contiguous().cpu(), (rows[here] - piece.start).cpu(), sparse=True)


def _to_host(part: torch.Tensor, index: int) -> Part:
    if not part.is_cuda:
        return Part(index, part)
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    host.copy_(part, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return Part(index, host, copied=copied)
