"""Gradients as they are sent to one shard (dense, or the rows that are not zero), and their sum over workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from phalanx.engines.parameter_server.bundle import ShardMemory
from phalanx.engines.parameter_server.placement import Piece
from phalanx.engines.parameter_server.protocol import bytes_of


@dataclass
class GradientPart:
    """Gradient of one piece, or of some of its `rows`."""

    index: int
    values: torch.Tensor
    rows: torch.Tensor | None = None
    sparse: bool = False
    copied: torch.cuda.Event | None = None
    """The end of the copy from the GPU, which runs during backward."""

    @property
    def count(self) -> int:
        """How many rows are sent; -1: the whole piece."""
        return -1 if self.rows is None else self.rows.numel()

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return self.values.nbytes + (0 if self.rows is None else self.rows.nbytes)

    def arrive(self) -> None:
        """Wait until the values are in host memory."""
        if self.copied is not None:
            self.copied.synchronize()

    def buffers(self) -> list[memoryview]:
        """Return the memory to send."""
        return [bytes_of(tensor) for tensor in (self.rows, self.values) if tensor is not None]


def cut_gradient(gradient: torch.Tensor, index: int, piece: Piece, *, find_rows: bool) -> GradientPart:
    """Return a piece's part of a parameter's gradient."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        here = (rows >= piece.start) & (rows < piece.stop)
        return GradientPart(index, values[here].contiguous().cpu(), (rows[here] - piece.start).cpu(), sparse=True)
    part = (gradient.detach()[piece.start : piece.stop] if piece.shape else gradient.detach()).contiguous()
    if find_rows and part.ndim > 1:
        rows = part.flatten(1).any(dim=1).nonzero().flatten()
        saved = part.nbytes - rows.numel() * (part.nbytes // part.shape[0] + rows.element_size())
        if saved > 0:
            return GradientPart(index, part[rows].cpu(), rows.cpu())
    if not part.is_cuda:
        return GradientPart(index, part)
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    host.copy_(part, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return GradientPart(index, host, copied=copied)


@dataclass(frozen=True)
class Rows:
    """Some rows of a gradient, where the others are zero. `sparse`: the worker's gradient was a sparse tensor."""

    rows: torch.Tensor
    values: torch.Tensor
    sparse: bool


class Contribution:
    """One worker's gradients of a step, in memory that is reused in every step."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.memory = ShardMemory(pieces)
        self.seq = 0
        self.dense: set[int] = set()
        self.rows: dict[int, Rows] = {}

    def begin(self, seq: int) -> None:
        """Drop the gradients of another step."""
        if seq != self.seq:
            self.seq = seq
            self.dense.clear()
            self.rows.clear()


@dataclass
class Merged:
    """The sum of several workers' gradients, by piece."""

    count: int
    base: Contribution | None = None
    """The contribution whose memory holds the sums: they are overwritten when its worker pushes again."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def square(self) -> float:
        """Return the squared norm of the mean, in double precision."""
        values = [gradient.values() if gradient.is_sparse else gradient for gradient in self.gradients.values()]
        norms = [float(torch.linalg.vector_norm(value, dtype=torch.float64)) for value in values if value.numel()]
        return math.fsum(norm * norm for norm in norms) / self.count**2

    def scale(self, factor: float) -> None:
        """Turn the sum into the mean times a factor."""
        if factor == self.count:
            return
        for gradient in self.gradients.values():
            # By its values: after multiplying a sparse tensor as a whole, torch treats it as not coalesced.
            (gradient.values() if gradient.is_sparse else gradient).mul_(factor / self.count)


def merge(parts: Sequence[Contribution], pieces: Sequence[Piece]) -> Merged:
    """Add up contributions in the order given, in the memory of the first one: equal order, equal bits."""
    merged = Merged(len(parts), parts[0] if parts else None)
    for index, piece in enumerate(pieces):
        dense = [part.memory.views[index] for part in parts if index in part.dense]
        rows = [part.rows[index] for part in parts if index in part.rows]
        if rows and not dense and all(item.sparse for item in rows):
            indices = torch.cat([item.rows for item in rows]).unsqueeze(0)
            values = torch.cat([item.values for item in rows])
            summed = torch.sparse_coo_tensor(indices, values, piece.shape, check_invariants=True)
            merged.gradients[index] = summed.coalesce()
        elif dense or rows:
            merged.gradients[index] = _dense_sum(parts, index)
    return merged


def _dense_sum(parts: Sequence[Contribution], index: int) -> torch.Tensor:
    total = parts[0].memory.views[index]
    if index not in parts[0].dense:
        total.zero_()
    for part in parts:
        if index in part.rows:
            total.index_add_(0, part.rows[index].rows, part.rows[index].values)
        elif index in part.dense and part is not parts[0]:
            total.add_(part.memory.views[index])
    return total
