"""Losses between two logging steps: kept on the device and read with one transfer, so that no step waits for it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist

from phalanx.world.abort import raise_if_aborted
from phalanx.world.world import World


class StepLoss(NamedTuple):
    """The mean loss of a step, and how many samples (or labels) it is the mean of."""

    loss: float
    weight: float


Losses = dict[int, StepLoss]
"""By step."""


def totals(losses: Losses) -> tuple[float, float]:
    """Return the sum of some losses over all samples (or labels), and their number."""
    return sum(each.loss * each.weight for each in losses.values()), sum(each.weight for each in losses.values())


class LossLog:
    """Collects each micro-batch's loss and its weight; `read` gives the global-batch loss of every step since."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._losses: list[torch.Tensor] = []
        self._shares: list[float | torch.Tensor] = []
        self._step_of: list[int] = []
        self._first_step = 0

    def add(self, step: int, loss: torch.Tensor, share: float | torch.Tensor) -> None:
        """Add a micro-batch's mean loss and its samples, or labels."""
        self._losses.append(loss.detach())
        self._shares.append(share)
        self._step_of.append(step)

    def read(self) -> Losses:
        """Return step -> loss of its global batch, and clear the log; all ranks must call this together."""
        if not self._losses:
            return {}
        first, single_rank = self._step_of[0], self._world.world_size == 1
        losses = torch.stack(self._losses).double()
        if single_rank or losses.device.type == "cpu":
            # One transfer, or none: for a few numbers the host is faster than starting kernels.
            numbers = [share for share in self._shares if not isinstance(share, torch.Tensor)]
            on_host = len(numbers) == len(self._shares)
            table = self._sums(losses.tolist(), numbers if on_host else _stack(self._shares, None).tolist())
        else:
            table = self._sums_on_device(losses)
        if not single_rank:
            dist.all_reduce(table)
        self._losses.clear()
        self._shares.clear()
        self._step_of.clear()
        totals, weights = table.tolist()
        raise_if_aborted()  # else a part of a sum
        rows_read = zip(itertools.count(first), totals, weights, strict=False)
        # A step in which no label counts has no loss to report.
        return {step: StepLoss(total / weight, weight) for step, total, weight in rows_read if weight}

    def _sums(self, losses: list[float], shares: list[float]) -> torch.Tensor:
        """Return two rows, by step: the weighted losses and the weights.

        An empty batch has share 0; a NaN in its loss must not spread to all ranks.
        """
        first = self._step_of[0]
        weighted, weights = ([0.0] * (self._step_of[-1] - first + 1) for _ in range(2))
        for step, loss, share in zip(self._step_of, losses, shares, strict=True):
            if share > 0:
                weighted[step - first] += loss * share
                weights[step - first] += share
        return torch.tensor([weighted, weights], dtype=torch.float64)

    def _sums_on_device(self, losses: torch.Tensor) -> torch.Tensor:
        device, first = losses.device, self._step_of[0]
        rows = torch.tensor([step - first for step in self._step_of], device=device)
        shares = _stack(self._shares, device)
        weighted = torch.where(shares > 0, losses * shares, torch.zeros_like(losses))
        table = torch.zeros(2, self._step_of[-1] - first + 1, dtype=torch.float64, device=device)
        table[0].index_add_(0, rows, weighted)
        table[1].index_add_(0, rows, shares)
        return table


def _stack(shares: list[float | torch.Tensor], device: torch.device | None) -> torch.Tensor:
    """Return the shares as one tensor; numbers alone move to the device in one transfer."""
    if not any(isinstance(share, torch.Tensor) for share in shares):
        return torch.tensor(shares, dtype=torch.float64, device=device)
    return torch.stack([torch.as_tensor(share, device=device).double() for share in shares])
