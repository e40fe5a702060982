"""What a compressor is: it leaves the average over all ranks in a bucket, and sends fewer bytes than a plain sum.

All ranks must end with equal bits, or their weights drift apart: what one rank computed for others travels to itself in
the same coarse form, and every rank adds up in the same order.
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
    """Averages buckets over the ranks of an exchange. One object serves one model on one rank."""

    name: ClassVar[str]
    keeps_residuals: ClassVar[bool] = False
    """Whether something of one step is added to the next: then both must be in one unit, fp16's loss scale included."""

    def __init__(self, *, seed: int = 0, warmup: int = 0) -> None:
        self.seed = seed
        self.warmup = warmup
        self.steps = 0
        """Steps begun so far; the first bucket of a step has index 0."""
        self.plain_bytes = 0
        """What this rank would have sent without compression, by a ring."""
        self.unit: torch.Tensor | float | None = None
        """What a gradient of the mean loss is multiplied by in this step, on all ranks alike; None: by nothing."""

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Leave the average over the ranks in the bucket; all ranks call this for the same buckets in one order."""
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
        """Return what the next step needs of the steps before, under the parameters' names."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned; what another compressor kept beside it is passed over."""
        self.steps = int(state.get("steps", 0))


class Uncompressed(Compressor):
    """The plain average: what the others are measured against."""

    name = "none"

    def _reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        average(bucket.flat, exchange)


def average(tensor: torch.Tensor, exchange: Exchange) -> None:
    """Average a tensor in place, as it is."""
    exchange.all_reduce(tensor, "mean")


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Return what one rank of a ring sends to add up this many bytes."""
    return 2 * (ranks - 1) * nbytes // ranks


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a type that errors can be added up in: half precision becomes float32, a copy."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; one pass, nothing allocated. Waits for the device."""
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor, math.inf)))


def mixed_seed(*parts: int | str) -> int:
    """Return one seed for several numbers and names, far from that of any others."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(device: torch.device, *parts: int | str) -> torch.Generator:
    """Return a random generator that depends on these parts alone: a resumed run draws what it would have drawn."""
    return torch.Generator(device).manual_seed(mixed_seed(*parts))
