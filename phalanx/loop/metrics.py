"""Metrics over exactly the samples of a split: sums and counts on the device, read once at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from phalanx.config.labels import IGNORED_LABEL
from phalanx.errors import ModelError

Metric = Callable[[Any, Any], Any]
"""metric(output, target) -> one value per sample, the mean over the batch, or (total, number of what was counted)."""


class MetricSums:
    """Adds up the loss and the metrics of this rank's samples; `result` makes them means over all ranks."""

    def __init__(self, metrics: Mapping[str, Metric] | None, device: torch.device) -> None:
        self._metrics = metrics
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}

    def add(
        self, loss: torch.Tensor | None, output: Any, target: Any, samples: int, weight: torch.Tensor | None = None
    ) -> None:
        """Count one batch of which `samples` are real; `weight` is what the loss is a mean of, if not samples."""
        if loss is not None:
            units = torch.tensor(float(samples)) if weight is None else weight * float(samples > 0)
            units = units.to(loss.device)
            # The mean over no label at all is NaN, and counts for nothing.
            self._accumulate("loss", torch.where(units > 0, loss.detach().double() * units, 0.0), units)
        if self._metrics is None:
            self._metrics = default_metrics(output, target)
        for name, metric in self._metrics.items():
            found = metric(output, target)
            if isinstance(found, tuple):  # a total and what it counts, of which a stand-in batch has nothing
                total, units = (torch.as_tensor(part).detach().double() * float(samples > 0) for part in found)
            else:
                value = torch.as_tensor(found, device=self._device).detach().double()
                # The mean over a stand-in batch may be NaN, and counts for nothing.
                total = value[:samples].sum() if value.ndim else value * samples if samples else torch.zeros(())
                units = torch.tensor(float(samples))
            self._accumulate(name, total, units)

    def _accumulate(self, name: str, total: torch.Tensor, units: torch.Tensor) -> None:
        row = torch.stack([total.to(self._device), units.to(self._device, torch.float64)])
        self._sums[name] = self._sums[name] + row if name in self._sums else row

    def result(self) -> dict[str, float]:
        """Return the means over every sample of every rank; all ranks must call this."""
        names = sorted(self._sums)
        if not names:
            raise ModelError("evaluation produced neither a loss nor a metric", hint="Give loss_fn or metrics.")
        totals = torch.stack([self._sums[name] for name in names])
        if dist.is_initialized():
            dist.all_reduce(totals)
        means = (totals[:, 0] / totals[:, 1]).tolist()
        return dict(zip(names, means, strict=True))


def default_metrics(output: Any, target: Any) -> dict[str, Metric]:
    """Return accuracy where outputs are class scores for integer labels, else nothing."""
    if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor):
        labels = not target.is_floating_point() and target.dtype != torch.bool
        if labels and output.ndim == target.ndim + 1 and output.is_floating_point():
            return {"accuracy": accuracy}
    return {}


def accuracy(output: torch.Tensor, target: torch.Tensor) -> Any:
    """Return what the highest scores hit: a value per sample, or hits and labels where a sample has several.

    Ignored labels do not count.
    """
    classes = -1 if target.ndim > 1 and output.shape[:-1] == target.shape else 1
    hits = (output.argmax(dim=classes) == target).double()
    if target.ndim == 1:
        return hits
    counted = target != IGNORED_LABEL
    return hits[counted].sum(), counted.sum()
