"""Slices of a sequence: how tensors are cut over the ranks of a group, joined again, and averaged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import torch_compat
from phalanx.models.contract import ChecksLength, implements
from phalanx.torch_compat import pytree
from phalanx.world.splits import uneven_context

TARGET_NAMES = ("targets", "target", "labels", "label", "y")
"""Names of the argument of a model's forward that holds the targets."""


class SequenceSlices:
    """Dim 1 of tensors in 2N chunks over N ranks: rank i holds the chunks i and 2N-1-i (see `ring_attention`)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def positions(self, time: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of this rank's slice in the sequence; ModelError where it cannot be cut."""
        if (wrong := uneven_context(time, self.size)) is not None:
            raise wrong
        chunk = time // (2 * self.size)
        return torch.cat([torch.arange(i * chunk, (i + 1) * chunk, device=device) for i in self._chunks(self.rank)])

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of dim 1."""
        chunks = whole.chunk(2 * self.size, dim=1)
        return torch.cat([chunks[number] for number in self._chunks(self.rank)], dim=1)

    def cut_all(self, inputs: Any, model: nn.Module) -> tuple[Any, Tensor]:
        """Return inputs with every tensor cut that is as long as the first, and the positions of this rank's slice."""
        first = next(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
        if implements(model, ChecksLength):
            model.check_length(first.shape[1])
        own = self.positions(first.shape[1], first.device)

        def cut(tensor: Tensor) -> Tensor:
            return self.cut(tensor) if tensor.shape[:2] == first.shape[:2] else tensor

        return pytree.tree_map_only(Tensor, cut, inputs), own

    def join(self, part: Tensor) -> Tensor:
        """Return the whole sequence from all slices; all ranks must compute the same from it up to the loss."""
        whole: Tensor = _Joined.apply(part, self)  # type: ignore[no-untyped-call]
        return whole

    def gather(self, part: Tensor) -> Tensor:
        """Return the slices of all ranks in the sequence's order."""
        gathered = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        torch_compat.all_gather_flat(gathered, part.contiguous(), group=self.group)
        firsts, seconds = zip(*(piece.chunk(2, dim=1) for piece in gathered.chunk(self.size)), strict=True)
        return torch.cat([*firsts, *reversed(seconds)], dim=1)

    def mean(self, value: float | Tensor, device: torch.device) -> Tensor:
        """Return the mean of a number over the ranks of the group, without gradient."""
        total = torch.as_tensor(value, dtype=torch.float64, device=device).clone()
        dist.all_reduce(total, group=self.group)
        return total / self.size

    def _chunks(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.size - 1 - rank


class _Joined(torch.autograd.Function):
    """Joins slices; the gradient of a rank's slice counts N times, since gradients are averaged over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, slices: SequenceSlices) -> Tensor:
        ctx.slices = slices
        return slices.gather(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        slices: SequenceSlices = ctx.slices
        return slices.cut(gradient) * slices.size, None


def whole_mean(mean: Tensor, count: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean over all ranks' counts from each rank's mean; its gradient, averaged, is that of the whole."""
    found: Tensor = _WholeMean.apply(mean, count, group)  # type: ignore[no-untyped-call]
    return found


class _WholeMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, count: Tensor, group: dist.ProcessGroup) -> Tensor:
        # A slice without a label that counts has no mean: its NaN must not spread to all ranks.
        weighted = torch.where(count > 0, mean.double() * count, 0.0)
        sums = torch.stack([weighted, count.double()])
        dist.all_reduce(sums, group=group)
        ctx.share = dist.get_world_size(group) * count / sums[1]
        return (sums[0] / sums[1]).to(mean.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient * ctx.share).to(gradient.dtype), None, None
