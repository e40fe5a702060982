"""Gradient buckets: which gradients are averaged together, and their flat memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Bucket:
    """Flat memory of some gradients, and each gradient as a view of it, with its parameter's name."""

    index: int
    flat: torch.Tensor
    names: tuple[str, ...]
    parts: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return self.flat.numel() * self.flat.element_size()


FIRST_BYTES = 1 << 20
"""The first bucket is small: the earlier communication starts, the more of it overlaps with the backward pass."""


@dataclass
class BucketPlan:
    """The gradients of one bucket by their number, all of one dtype."""

    dtype: torch.dtype
    members: list[int] = field(default_factory=list)
    numel: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket."""
        return self.numel * self.dtype.itemsize


def plan_buckets(gradients: Iterable[tuple[int, int, torch.dtype]], cap_bytes: float) -> list[BucketPlan]:
    """Fill buckets up to `cap_bytes` with gradients (number, elements, dtype) in the given order, by dtype."""
    full: list[BucketPlan] = []
    filling: dict[torch.dtype, BucketPlan] = {}
    for number, numel, dtype in gradients:
        bucket = filling.get(dtype)
        limit = min(cap_bytes, FIRST_BYTES) if not full else cap_bytes
        if bucket is not None and bucket.nbytes + numel * dtype.itemsize > limit:
            full.append(filling.pop(dtype))
            bucket = None
        if bucket is None:
            bucket = filling[dtype] = BucketPlan(dtype)
        bucket.members.append(number)
        bucket.numel += numel
    return full + list(filling.values())
