"""The collectives that gradient synchronisation and compression need, as one interface (`Exchange`), and the buckets of
gradients that they average together.

`TorchExchange` uses torch's process group. Others: `SharedExchange` (`shm/`) and `ChannelExchange`
(`collectives/hierarchical.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from phalanx import torch_compat


class Exchange:
    """Collectives of a group of ranks, here of one rank. Every call is made by all ranks, in the same order."""

    rank: int = 0
    size: int = 1
    sent_bytes: int = 0
    """Bytes that this rank has sent, as the algorithm counts them."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks in place, by sum, mean or max."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank; all have one shape."""
        return tensor.unsqueeze(0)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here, by rank."""
        return tensor

    def close(self) -> None:
        """Release memory, without communication: other ranks may have failed."""


class TorchExchange(Exchange):
    """An `Exchange` over a process group of torch.distributed: gloo, nccl or phalanx."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Combine a tensor over the ranks, in place."""
        self.sent_bytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        if op == "mean":  # divided first, as torch's DDP does: the same bits, and fp16 does not overflow
            tensor.mul_(1.0 / self.size)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=self.group)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank."""
        self.sent_bytes += (self.size - 1) * tensor.nbytes
        gathered = tensor.new_empty((self.size, *tensor.shape))
        torch_compat.all_gather_flat(gathered.view(-1), tensor.reshape(-1), group=self.group)
        return gathered

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here."""
        self.sent_bytes += (self.size - 1) * tensor.nbytes // self.size
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor.contiguous(), group=self.group)
        return received


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
