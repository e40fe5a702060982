"""The base class of compressors, which average a bucket over all ranks with fewer bytes than a plain sum.

All ranks must end with equal bits, or their weights diverge: a rank decodes also what it encoded itself, and every rank
adds up in the same order.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from phalanx.comm.buckets import Bucket
from phalanx.comm.exchange import Exchange


class Compressor(ABC):
    """Averages buckets over the ranks of an exchange; one object per model and rank."""

    name: ClassVar[str]
    keeps_residuals: ClassVar[bool] = False
    """Whether residuals are added to the next step: then both must have the same unit, with fp16's loss scale."""

    def __init__(self, *, seed: int = 0, warmup: int = 0) -> None:
        self.seed = seed
        self.warmup = warmup
        self.steps = 0
        """Steps started so far; the first bucket of a step has index 0."""
        self.plain_bytes = 0
        """What this rank would have sent without compression, by a ring."""
        self.unit: torch.Tensor | float | None = None
        """The factor of the gradients in this step, equal on all ranks; None: 1."""

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Replace a bucket by its average; all ranks call this for the same buckets in the same order."""
        if bucket.index == 0:
            self.steps += 1
        self.plain_bytes += ring_bytes(bucket.nbytes, exchange.size)
        if exchange.size == 1 or bucket.flat.numel() == 0:
            return
        if self.steps <= self.warmup:
            average(bucket.flat, exchange)
        elif self.unit is None:
            self._reduce(bucket, exchange)
        else:
            bucket.flat.div_(self.unit)
            self._reduce(bucket, exchange)
            bucket.flat.mul_(self.unit)

    @abstractmethod
    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Average a bucket that is not empty, over several ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next step needs, by parameter name."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; entries of another compressor are ignored."""
        self.steps = int(state.get("steps", 0))


class Uncompressed(Compressor):
    """The plain average."""

    name = "none"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        average(bucket.flat, exchange)


def average(tensor: torch.Tensor, exchange: Exchange) -> None:
    """Average a tensor in place, without compression."""
    exchange.all_reduce(tensor, "mean")


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that one rank of a ring sends in an all-reduce."""
    return 2 * (ranks - 1) * nbytes // ranks


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with enough precision to add up errors: half precision becomes float32, a copy."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, without allocating memory; waits for the device."""
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor, math.inf)))


def generator(device: torch.device, *parts: int | str) -> torch.Generator:
    """Return a random generator that depends on these parts only, so that a resumed run draws the same numbers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
