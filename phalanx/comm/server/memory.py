"""One run of memory for all pieces of a shard: what travels whole is sent and received in one go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.comm.server.frames import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.comm.server.placement import Piece

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
