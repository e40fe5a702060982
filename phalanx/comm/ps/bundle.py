"""Tensors in transit: one block of memory per shard, described by JSON.

The same form travels between worker and shard, and is what a shard writes to its file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.ps.protocol import bytes_of
from phalanx.errors import ServerError

if TYPE_CHECKING:
    from phalanx.comm.ps.placement import Piece


_ALIGNMENT = 64


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype by the name that travels; ValueError for anything else."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name as it travels."""
    return str(dtype).removeprefix("torch.")


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
        """Those that travel whole, which come first."""
        self.views = [
            self.flat[offset : offset + piece.nbytes].view(dtype_of(piece.dtype)).view(piece.shape)
            for piece, offset in zip(pieces, offsets, strict=True)
        ]

    def bytes_of_piece(self, index: int) -> memoryview:
        """Return one piece's memory."""
        return bytes_of(self.views[index])


VALUE = "="
"""The key under which a piece's own values stand, beside the optimizer's keys."""


@dataclass
class Bundle:
    """Tensors and plain values by (piece, key)."""

    tensors: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    plain: dict[tuple[int, str], Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return what says how the bytes are to be read."""
        rows = [[piece, key, name_of(t.dtype), list(t.shape)] for (piece, key), t in self.tensors.items()]
        return {"tensors": rows, "plain": [[piece, key, value] for (piece, key), value in self.plain.items()]}

    def buffers(self) -> list[memoryview]:
        """Return the tensors' memory, in the order of the description."""
        return [bytes_of(tensor) for tensor in self.tensors.values()]

    @classmethod
    def allocate(cls, described: dict[str, Any], payload: int) -> Bundle:
        """Make room for what a description announces; refuse one whose sizes do not add up to the bytes."""
        rows = [
            (int(piece), str(key), dtype_of(dtype), tuple(shape)) for piece, key, dtype, shape in described["tensors"]
        ]
        if sum(math.prod(shape) * dtype.itemsize for _, _, dtype, shape in rows) != payload:
            raise ServerError("a bundle of tensors is not as long as it says")
        tensors = {(piece, key): torch.empty(shape, dtype=dtype) for piece, key, dtype, shape in rows}
        return cls(tensors, {(int(piece), str(key)): value for piece, key, value in described["plain"]})
