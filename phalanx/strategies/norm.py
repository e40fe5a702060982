"""One gradient norm over parameters that lie on the ranks in different ways."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from phalanx.strategies.base import local

if TYPE_CHECKING:
    from collections.abc import Sequence


def global_norm(gradients: Sequence[torch.Tensor], holders: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the norm of all gradients with one all-reduce over the world, whatever their meshes.

    `holders`: over how many ranks each gradient lies, cut or copied. An element that several ranks hold counts on each
    of them by its share, so that it counts once in all.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        parts = [local(gradient) for gradient in gradients]
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(parts)])
        shares = [_parts(gradient) / ranks for gradient, ranks in zip(gradients, holders, strict=True)]
        total = (norms.square() * torch.tensor(shares, dtype=torch.float64).to(norms.device)).sum()
    dist.all_reduce(total)
    return total.sqrt()


def scale_to_norm(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients of this norm down to `max_norm`, without asking the device whether it is needed."""
    if not gradients:
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(gradient) for gradient in gradients], factor)


def _parts(gradient: torch.Tensor) -> int:
    """Return into how many different parts a gradient is cut."""
    if not isinstance(gradient, DTensor):
        return 1
    mesh = gradient.device_mesh  # not is_shard: torch does not count the strided shards of two axes as such
    return math.prod(mesh.size(axis) for axis, place in enumerate(gradient.placements) if not place.is_replicate())
