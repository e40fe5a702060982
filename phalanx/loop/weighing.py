"""Weights of a step's losses that are known only afterwards, such as token counts over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


class StepWeight:
    """The weights of a step's micro-batches on this rank, and their mean over the ranks that average gradients."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device = device
        self._ranks = ranks
        self._here: torch.Tensor | None = None
        self._mean: torch.Tensor | None = None

    def add(self, weight: float | torch.Tensor) -> torch.Tensor:
        """Count a micro-batch; return its weight as a tensor, the factor on its loss."""
        weight = torch.as_tensor(weight, dtype=torch.float64, device=self._device)
        self._here = weight.clone() if self._here is None else self._here + weight
        self._mean = None
        return weight

    def mean(self) -> torch.Tensor | None:
        """Return what the averaged gradient has to be divided by, or None without weights; all ranks call this.

        One all-reduce, at the first call. Each sample counts once for every rank that saw it, so what the sum is
        divided by is the world's size, not dp_size.
        """
        if self._here is None or self._mean is not None:
            return self._mean
        total = self._here.clone()
        if self._ranks > 1:
            dist.all_reduce(total)
        # A step without any weight has no gradient either: divided by one it stays zero, by zero it would be NaN.
        self._mean = torch.where(total == 0, 1.0, total / self._ranks)
        return self._mean

    def clear(self) -> None:
        """Begin the next step."""
        self._here = self._mean = None
