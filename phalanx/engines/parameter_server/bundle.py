"""Values and optimizer states of a shard's pieces, as they are sent between worker and shard and written to files."""

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
