"""What workers push for one step, and how several workers' gradients become one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from phalanx.comm.server.memory import ShardMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.comm.server.placement import Piece


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
