"""The loss of a batch whose parts pass through a pipeline one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.utils._pytree as pytree

from phalanx.strategies.batch_rows import cut_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class BatchLoss(Protocol):
    """How a batch is judged: by the last stage, a part at a time."""

    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        """Return the mean loss of a part of the batch."""

    def weigh(self, batch: Any) -> float | torch.Tensor:
        """Return how much a part of the batch counts in the mean over the whole."""


class Judged(NamedTuple):
    """An output and its loss, as models that judge themselves return them."""

    loss: torch.Tensor
    logits: Any


class Judge:
    """The loss of each microbatch, weighed so that their sum is the mean over the batch's real samples."""

    def __init__(
        self,
        loss: BatchLoss,
        batch: Any,
        rows: int,
        size: int,
        factor: float | torch.Tensor,
        autocast: Callable[[], AbstractContextManager[Any]],
        weight: float | torch.Tensor,
    ) -> None:
        self._loss = loss
        self._batch = batch
        self._rows = rows
        self._size = size
        self._factor = factor
        self._autocast = autocast
        self._weight = weight
        self._found: dict[int, torch.Tensor] = {}

    def __call__(self, output: Any, number: int) -> torch.Tensor:
        """Return what a microbatch adds to the loss that is differentiated."""
        start = number * self._size
        real = min(self._size, self._rows - start)
        if real <= 0:  # the batch was short: these rows are stand-ins
            return torch.stack([leaf.sum() * 0.0 for leaf in pytree.tree_leaves(output)]).sum()
        part = cut_rows(self._batch, start, start + real)
        seen = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:real], output)
        with self._autocast():
            loss = self._loss(seen, part)
        share = self._loss.weigh(part) / self._weight
        if isinstance(share, torch.Tensor):  # without a label that counts there is no mean, and nothing to add
            loss = torch.where(share > 0, loss, 0.0)
        self._found[number] = loss.detach() * share
        return loss * (share * self._factor)

    def total(self, device: torch.device) -> torch.Tensor:
        """Return the mean loss of the batch, where this rank has seen it."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for value in self._found.values():
            total += value
        return total
