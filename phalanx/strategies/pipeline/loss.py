"""The loss of each micro-batch on the last pipeline stage."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from phalanx.strategies.base import BatchPass
from phalanx.torch_compat import pytree


def cut_rows(batch: Any, start: int, end: int) -> Any:
    """Return the samples from `start` to before `end`."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[start:end], batch)


def fill_rows(batch: Any, rows: int, count: int) -> Any:
    """Pad a short batch with its last row."""

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor[-1:].expand(count - rows, *tensor.shape[1:])])

    return tuple(pytree.tree_map_only(torch.Tensor, fill, item) for item in batch)


class LossShare(NamedTuple):
    """A loss and the output, in the form of models that compute their loss."""

    loss: torch.Tensor
    logits: Any


class MicrobatchLoss:
    """The loss of each microbatch, weighted so that the sum is the mean over the batch without padding."""

    def __init__(
        self,
        passes: BatchPass,
        batch: Any,
        rows: int,
        size: int,
        factor: float | torch.Tensor,
        weight: float | torch.Tensor,
    ) -> None:
        self._passes = passes
        self._batch = batch
        self._rows = rows
        self._size = size
        self._factor = factor
        self._weight = weight
        self._losses: dict[int, torch.Tensor] = {}

    def __call__(self, output: Any, number: int) -> torch.Tensor:
        """Return a microbatch's share of the loss, for backward."""
        start = number * self._size
        real = min(self._size, self._rows - start)
        if real <= 0:  # the batch was short: these rows are padding
            return torch.stack([leaf.sum() * 0.0 for leaf in pytree.tree_leaves(output)]).sum()
        part = cut_rows(self._batch, start, start + real)
        outputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:real], output)
        assert self._passes.loss_fn is not None, "checked before the schedule started"
        with self._passes.autocast():
            loss = self._passes.loss_fn(outputs, self._passes.target(part))
        share = self._passes.weigh(part) / self._weight
        if isinstance(share, torch.Tensor):  # without a label that counts there is no mean and nothing to add
            loss = torch.where(share > 0, loss, 0.0)
        self._losses[number] = loss.detach() * share
        return loss * (share * self._factor)

    def total(self, device: torch.device) -> torch.Tensor:
        """Return the mean loss of the batch on a rank with the last stage, else zero."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for value in self._losses.values():
            total += value
        return total
