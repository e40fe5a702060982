"""Messages between worker and shard: gradients (dense, or the rows that are not zero) and their sum over workers, and
values and optimizer states of a shard's pieces, which are also written to files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.engines.parameter_server.placement import Piece, Placement
from phalanx.engines.parameter_server.protocol import bytes_of, dtype_of, name_of
from phalanx.errors import ServerError


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
class MergedGradients:
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


def merge(parts: Sequence[Contribution], pieces: Sequence[Piece]) -> MergedGradients:
    """Add up contributions in the order given, in the memory of the first one: equal order, equal bits."""
    merged = MergedGradients(len(parts), parts[0] if parts else None)
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


_ALIGNMENT = 64


class ShardMemory:
    """Values of a shard's pieces, each a view of one buffer."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        offsets, end, dense_end = [], 0, 0
        for piece in pieces:
            offsets.append(end)
            end += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
            dense_end = dense_end if piece.lazy else end
        self.flat = torch.zeros(end, dtype=torch.uint8)
        self.dense = self.flat[:dense_end]
        """The pieces that are sent whole, which come first."""
        self.views = [
            self.flat[offset : offset + piece.nbytes].view(dtype_of(piece.dtype)).view(piece.shape)
            for piece, offset in zip(pieces, offsets, strict=True)
        ]


VALUE = "="
"""The key of a piece's values, next to the keys of the optimizer's states."""


@dataclass
class Bundle:
    """Tensors and plain values by (piece, key)."""

    tensors: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    plain: dict[tuple[int, str], Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return the JSON header that says how to read the bytes."""
        rows = [[piece, key, name_of(t.dtype), list(t.shape)] for (piece, key), t in self.tensors.items()]
        return {"tensors": rows, "plain": [[piece, key, value] for (piece, key), value in self.plain.items()]}

    def buffers(self) -> list[memoryview]:
        """Return the tensors' memory, in the order of the description."""
        return [bytes_of(tensor) for tensor in self.tensors.values()]

    @classmethod
    def allocate(cls, described: dict[str, Any], payload: int) -> Bundle:
        """Allocate what a description announces; ServerError where its sizes do not add up to the payload."""
        rows = [
            (int(piece), str(key), dtype_of(dtype), tuple(shape)) for piece, key, dtype, shape in described["tensors"]
        ]
        if sum(math.prod(shape) * dtype.itemsize for _, _, dtype, shape in rows) != payload:
            raise ServerError("the sizes of a bundle's tensors do not add up to its length")
        tensors = {(piece, key): torch.empty(shape, dtype=dtype) for piece, key, dtype, shape in rows}
        return cls(tensors, {(int(piece), str(key)): value for piece, key, value in described["plain"]})


def join_pieces(placement: Placement, bundles: Sequence[Bundle]) -> dict[str, dict[str, Any]]:
    """Join the rows of each parameter; what has no rows (a step count) is taken from the first piece."""
    rows: dict[str, dict[str, list[tuple[int, torch.Tensor]]]] = defaultdict(lambda: defaultdict(list))
    joined: dict[str, dict[str, Any]] = defaultdict(dict)
    for pieces, bundle in zip(placement.shards, bundles, strict=True):
        for (index, key), value in {**bundle.tensors, **bundle.plain}.items():
            piece = pieces[index]
            if isinstance(value, torch.Tensor) and tuple(value.shape) == piece.shape and piece.shape:
                rows[piece.name][key].append((piece.start, value))
            elif piece.start == 0:
                joined[piece.name][key] = value
    for name, keys in rows.items():
        for key, parts in keys.items():
            ordered = [value for _, value in sorted(parts, key=lambda part: part[0])]
            joined[name][key] = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
    return dict(joined)


def split_pieces(placement: Placement, state: Mapping[str, Mapping[str, Any]]) -> list[Bundle]:
    """Cut each parameter's values and states into pieces, by shard: the inverse of `join_pieces`."""
    bundles = []
    for pieces in placement.shards:
        bundle = Bundle()
        for index, piece in enumerate(pieces):
            whole = state[piece.name][VALUE].shape
            for key, value in state[piece.name].items():
                if not isinstance(value, torch.Tensor):
                    bundle.plain[index, key] = value
                elif value.shape == whole and piece.shape:
                    bundle.tensors[index, key] = value.detach()[piece.start : piece.stop].cpu().contiguous()
                else:
                    bundle.tensors[index, key] = value.detach().cpu().contiguous()
        bundles.append(bundle)
    return bundles
