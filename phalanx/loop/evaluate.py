"""Evaluation and prediction: every sample exactly once, on all ranks, in the order of the data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.data.device import map_batch
from phalanx.loop.forward import count_labels, decide_forward, positional_parameters
from phalanx.loop.losses import LossFn
from phalanx.loop.metrics import Metric, MetricSums
from phalanx.loop.shapes import named_shapes

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation
    from phalanx.loop.prepare import PreparedLoader


@torch.no_grad()
def evaluate(
    formation: Formation,
    model: nn.Module,
    loader: PreparedLoader,
    loss_fn: LossFn | None,
    metrics: Mapping[str, Metric] | None,
) -> dict[str, float]:
    """Return the mean loss and metrics over all samples; equal on all ranks, which must all call this."""
    formation.strategy.consolidate(model)
    bare = model if formation.strategy.shards else formation.unwrap(model)
    was_training = bare.training
    bare.eval()
    sums = MetricSums(metrics, formation.device)
    by_tokens = formation.config.loss_weighting == "tokens"
    forward = None
    try:
        for batch in loader:
            forward = forward or decide_forward(formation.unwrap(model), loss_fn, batch)
            with formation.autocast():
                loss, output = forward.call(bare, batch)
            target = forward.target(batch)
            weight = count_labels(target) if by_tokens and loss is not None else None
            sums.add(loss, output, target, loader.current.samples, weight, may_shift=forward.may_shift)
    finally:
        bare.train(was_training)
    return sums.result()


@torch.no_grad()
def predict(formation: Formation, model: nn.Module, loader: PreparedLoader) -> list[tuple[int, Any]]:
    """Return this rank's outputs as (position of the batch's first sample, output on the CPU)."""
    bare = model if formation.strategy.shards else formation.unwrap(model)
    was_training = bare.training
    bare.eval()
    outputs: list[tuple[int, Any]] = []
    try:
        for batch in loader:
            with formation.autocast(), named_shapes(bare, batch):
                output = _output(bare, batch)
            samples = loader.current.samples
            if samples:
                outputs.append((loader.current.offset, _first(output, samples)))
    finally:
        bare.train(was_training)
    return outputs


def _output(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch's inputs: of (inputs, targets) the targets are left out, unless forward needs them."""
    if isinstance(batch, Mapping):
        result = model(**{key: value for key, value in batch.items() if key != "labels"})
    elif isinstance(batch, (tuple, list)):
        required = [p for p in positional_parameters(model) if p.default is p.empty]
        result = model(*batch[: max(1, len(batch) - 1, len(required))])
    else:
        result = model(batch)
    if type(result) is tuple:  # (logits, None): a model that got no targets has no loss
        present = [part for part in result if part is not None]
        return present[0] if len(present) == 1 else result
    return getattr(result, "logits", result)


def _first(output: Any, samples: int) -> Any:
    """Return the rows of real samples, on the CPU and in a dtype that NumPy knows."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor[:samples].cpu()
        return rows.float() if rows.dtype == torch.bfloat16 else rows

    return map_batch(output, cut, lambda leaf: isinstance(leaf, torch.Tensor))
