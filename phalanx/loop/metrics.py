"""Metrics over exactly the samples of a split: sums and counts on the device, read once at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import ModelError

Metric = Callable[[Any, Any], Any]
"""metric(output, target) -> one value per sample, or the mean over the batch."""


class MetricSums:
    """Adds up the loss and the metrics of this rank's samples; `result` makes them means over all ranks."""

    def __init__(self, metrics: Mapping[str, Metric] | None, device: torch.device) -> None:
        self._metrics = metrics
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, float] = {}

    def add(self, loss: torch.Tensor | None, output: Any, target: Any, samples: int) -> None:
        """Count one batch of which `samples` are real."""
        if loss is not None:
            self._accumulate("loss", loss.detach().double() * samples, samples)
        if self._metrics is None:
            self._metrics = default_metrics(output, target)
        for name, metric in self._metrics.items():
            value = torch.as_tensor(metric(output, target), device=self._device).detach().double()
            total = value[:samples].sum() if value.ndim else value * samples
            self._accumulate(name, total, samples)

    def _accumulate(self, name: str, total: torch.Tensor, samples: int) -> None:
        previous = self._sums.get(name)
        self._sums[name] = total if previous is None else previous + total
        self._counts[name] = self._counts.get(name, 0.0) + samples

    def result(self) -> dict[str, float]:
        """Return the means over every sample of every rank; all ranks must call this."""
        names = sorted(self._sums)
        if not names:
            raise ModelError("evaluation produced neither a loss nor a metric", hint="Give loss_fn or metrics.")
        counts = torch.tensor([self._counts[name] for name in names], dtype=torch.float64, device=self._device)
        totals = torch.stack([torch.stack([self._sums[name] for name in names]), counts])
        if dist.is_initialized():
            dist.all_reduce(totals)
        means = (totals[0] / totals[1]).tolist()
        return dict(zip(names, means, strict=True))


def default_metrics(output: Any, target: Any) -> dict[str, Metric]:
    """Return accuracy where outputs are class scores for integer labels, else nothing."""
    if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor):
        labels = not target.is_floating_point() and target.dtype != torch.bool
        if labels and output.ndim == target.ndim + 1 and output.is_floating_point():
            return {"accuracy": accuracy}
    return {}


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return, for each sample, the share of its labels that the highest score hits; ignored labels do not count."""
    classes = -1 if target.ndim > 1 and output.shape[:-1] == target.shape else 1
    hits = (output.argmax(dim=classes) == target).double()
    if target.ndim == 1:
        return hits
    counted = (target != -100).double()
    return (hits * counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)
