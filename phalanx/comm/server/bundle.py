"""A bundle: values and optimizer states of pieces, as JSON that describes them and one run of bytes.

The same form travels between worker and shard, and lies in a shard's file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.comm.server.frames import bytes_of
from phalanx.comm.server.memory import dtype_of, name_of
from phalanx.errors import ServerError

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
