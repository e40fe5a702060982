"""Evaluation and prediction: every sample exactly once, on all ranks, in the order of the data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from phalanx.loop.forward import decide_forward
from phalanx.loop.metrics import MetricSums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from phalanx.loop.formation import Formation
    from phalanx.loop.forward import LossFn
    from phalanx.loop.metrics import Metric
    from phalanx.loop.prepared import PreparedLoader


@torch.no_grad()
def evaluate(
    formation: Formation,
    model: nn.Module,
    loader: PreparedLoader,
    loss_fn: LossFn | None,
    metrics: Mapping[str, Metric] | None,
) -> dict[str, float]:
    """Return the mean loss and metrics over all samples; equal on all ranks, which must all call this."""
    formation.strategy.settle(model)
    bare = formation.unwrap(model)
    was_training = bare.training
    bare.eval()
    sums = MetricSums(metrics, formation.device)
    forward = None
    try:
        for batch in loader:
            forward = forward or decide_forward(bare, loss_fn, batch)
            with formation.autocast():
                loss, output = forward.run(bare, batch)
            sums.add(loss, output, forward.target(batch), loader.current.samples)
    finally:
        bare.train(was_training)
    return sums.result()


@torch.no_grad()
def predict(formation: Formation, model: nn.Module, loader: PreparedLoader) -> list[tuple[int, Any]]:
    """Return this rank's outputs as (position of the batch's first sample, output on the CPU)."""
    bare = formation.unwrap(model)
    was_training = bare.training
    bare.eval()
    outputs: list[tuple[int, Any]] = []
    try:
        for batch in loader:
            with formation.autocast():
                output = _output(bare, batch)
            samples = loader.current.samples
            if samples:
                outputs.append((loader.current.offset, _first(output, samples)))
    finally:
        bare.train(was_training)
    return outputs


def _output(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch's inputs: of (inputs, targets) pairs the targets are left out."""
    if isinstance(batch, dict):
        result = model(**{key: value for key, value in batch.items() if key != "labels"})
    elif isinstance(batch, (tuple, list)):
        result = model(*batch[: max(1, len(batch) - 1)])
    else:
        result = model(batch)
    return getattr(result, "logits", result)


def _first(output: Any, samples: int) -> Any:
    if isinstance(output, torch.Tensor):
        return output[:samples].float().cpu() if output.dtype == torch.bfloat16 else output[:samples].cpu()
    if isinstance(output, dict):
        return {key: _first(value, samples) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        return type(output)(_first(value, samples) for value in output)
    return output
