"""Gradients in transit: the part for one shard (dense, or the rows that are not zero), and the sum over workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from phalanx.comm.ps.bundle import ShardMemory
from phalanx.comm.ps.placement import Piece
from phalanx.comm.ps.protocol import bytes_of


@dataclass
class GradientPart:
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


def cut_gradient(gradient: torch.Tensor, index: int, piece: Piece, *, find_rows: bool) -> GradientPart:
    """Return a piece's part of a parameter's gradient."""
    if gradient.is_sparse:
        return _sparse_part(gradient.coalesce(), index, piece)
    part = (gradient.detach()[piece.start : piece.stop] if piece.shape else gradient.detach()).contiguous()
    if find_rows and part.ndim > 1:
        rows = part.flatten(1).any(dim=1).nonzero().flatten()
        saved = part.nbytes - rows.numel() * (part.nbytes // part.shape[0] + rows.element_size())
        if saved > 0:
            return GradientPart(index, part[rows].cpu(), rows.cpu())
    return _to_host(part, index)


def _sparse_part(gradient: torch.Tensor, index: int, piece: Piece) -> GradientPart:
    rows, values = gradient.indices()[0], gradient.values()
    here = (rows >= piece.start) & (rows < piece.stop)
    return GradientPart(index, values[here].contiguous().cpu(), (rows[here] - piece.start).cpu(), sparse=True)


def _to_host(part: torch.Tensor, index: int) -> GradientPart:
    if not part.is_cuda:
        return GradientPart(index, part)
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    host.copy_(part, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return GradientPart(index, host, copied=copied)


@dataclass(frozen=True)
class Rows:
    """Some rows of a gradient; the others are zero. `sparse`: the worker's own gradient was a sparse tensor."""

    rows: torch.Tensor
    values: torch.Tensor
    sparse: bool


class Contribution:
    """One worker's gradients of a step. Its memory is kept from step to step, so receiving allocates nothing."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.memory = ShardMemory(pieces)
        self.seq = 0
        self.dense: set[int] = set()
        self.rows: dict[int, Rows] = {}

    def begin(self, seq: int) -> None:
        """Forget the step before, unless this is the same one, pushed further or again."""
        if seq != self.seq:
            self.seq = seq
            self.dense.clear()
            self.rows.clear()


@dataclass
class Merged:
    """The sum of several workers' gradients, by piece."""

    count: int
    base: Contribution | None = None
    """The worker whose memory holds the sums: when it pushes the step again, they are overwritten."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def square(self) -> float:
        """Return the squared norm of the mean, added up in double precision."""
        values = [gradient.values() if gradient.is_sparse else gradient for gradient in self.gradients.values()]
        norms = [float(torch.linalg.vector_norm(value, dtype=torch.float64)) for value in values if value.numel()]
        return math.fsum(norm * norm for norm in norms) / self.count**2

    def scale(self, factor: float) -> None:
        """Turn the sum into the mean times a factor."""
        if factor == self.count:
            return
        for gradient in self.gradients.values():
            # By its values: torch forgets that a sparse tensor is coalesced when it is multiplied as a whole.
            (gradient.values() if gradient.is_sparse else gradient).mul_(factor / self.count)


def merge(parts: Sequence[Contribution], pieces: Sequence[Piece]) -> Merged:
    """Add up contributions in the order given: the same order gives the same bits. Their memory is used up."""
    merged = Merged(len(parts), parts[0] if parts else None)
    for index, piece in enumerate(pieces):
        dense = [part.memory.views[index] for part in parts if index in part.dense]
        rows = [part.rows[index] for part in parts if index in part.rows]
        if rows and not dense and all(item.sparse for item in rows):
            merged.gradients[index] = _sparse_sum(rows, piece)
        elif dense or rows:
            merged.gradients[index] = _dense_sum(parts, index)
    return merged


def _sparse_sum(rows: Sequence[Rows], piece: Piece) -> torch.Tensor:
    indices = torch.cat([item.rows for item in rows]).unsqueeze(0)
    values = torch.cat([item.values for item in rows])
    return torch.sparse_coo_tensor(indices, values, piece.shape, check_invariants=True).coalesce()


def _dense_sum(parts: Sequence[Contribution], index: int) -> torch.Tensor:
    """Add into the first worker's own memory, which is free as soon as the step is taken."""
    total = parts[0].memory.views[index]
    if index not in parts[0].dense:
        total.zero_()
    for part in parts:
        if index in part.rows:
            total.index_add_(0, part.rows[index].rows, part.rows[index].values)
        elif index in part.dense and part is not parts[0]:
            total.add_(part.memory.views[index])
    return total
