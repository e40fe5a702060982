"""Evaluation and prediction: every sample exactly once, on all ranks, in the order of the data set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.data.device import map_batch
from phalanx.errors import UsageError
from phalanx.loop.best import check_metrics
from phalanx.loop.forward import decide_forward, positional_parameters, raise_explained
from phalanx.loop.metrics import LossFn, Metric, MetricSums

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation
    from phalanx.loop.prepare import PreparedLoader


@contextmanager
def own_modes(model: nn.Module) -> Iterator[None]:
    """Return every module of a model to the mode (train or eval) that it was in, at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def begin_training(wrapped: nn.Module, model: nn.Module) -> None:
    """Put a model that is in eval mode into train mode; in one that trains, modules in eval mode stay so."""
    if not model.training:
        wrapped.train()


def kept_in_eval(model: nn.Module) -> str:
    """Return a note about modules with parameters or buffers that stay in eval mode while the model trains."""
    if not model.training:
        return ""
    kept = [name for name, module in model.named_modules() if not module.training and module.state_dict()]
    more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
    return f"in eval mode, and stay so: {kept[0]}{more} (model.train() before fit() trains all)" if kept else ""


@torch.no_grad()
def evaluate(
    formation: Formation,
    model: nn.Module,
    loader: PreparedLoader,
    loss_fn: LossFn | None,
    metrics: Mapping[str, Metric] | None,
    limit: float | None = None,
) -> dict[str, float]:
    """Return the mean loss and metrics over all samples; equal on all ranks, which must all call this.

    `metrics`: None for those of the data set, if it has any, else the usual ones. `limit`: the first batches only,
    this many or (below 1, or 1.0) a share of them.
    """
    formation.strategy.consolidate(model)
    bare = model if formation.strategy.shards else formation.unwrap(model)
    metrics = loader.sharded.own_metrics if metrics is None else metrics
    sums = MetricSums(metrics, formation.device, leads_samples=formation.world.leads_samples)
    forward = None
    with own_modes(bare):
        bare.eval()
        for batch in _first_batches(loader, limit):
            forward = forward or decide_forward(formation.unwrap(model), loss_fn, batch)
            with formation.autocast():
                loss, output = forward.call(bare, batch)
            target = forward.target(batch)
            by_labels = loss is not None and formation.weighs_labels(forward, model, batch, loader)
            weight = forward.count_labels(batch) if by_labels else None
            current, shifts = loader.current, forward.may_shift
            sums.add(loss, output, target, current.samples, weight, may_shift=shifts, offset=current.offset)
    return sums.result()


class Evaluation:
    """Evaluates the model of a training loop on its validation data, if it has any."""

    def __init__(self, loop: Any) -> None:
        """`loop`: the `TrainLoop`, which has one of these."""
        self._loop = loop
        self._loader: PreparedLoader | None = None
        if loop.task.val is not None:
            task = loop.task
            self._loader = loop.formation.prepare_loader(task.val, training=False).augmented(task.augment)
        self._last: tuple[int, dict[str, float]] = (-1, {})
        check_metrics(loop.config, has_val=self._loader is not None, known=self._names())

    def _names(self) -> list[str] | None:
        """The metrics that can be measured; None where one combines rows of all ranks, and names its values itself."""
        task, own = self._loop.task, None if self._loader is None else self._loader.sharded.own_metrics
        given = own if task.metrics is None else task.metrics
        if any(hasattr(metric, "combine") for metric in (given or {}).values()):
            return None
        names = ["loss", "accuracy"] if given is None else ["loss", *given]
        return ["train/loss", *(f"val/{name}" for name in names)]

    def after_epoch(self, epoch: int, *, last: bool) -> dict[str, float]:
        """Evaluate where it is due; return the metrics. `last`: no other epoch follows."""
        every = self._loop.config.eval_every
        if self._loader is None or not every or not (last or (epoch + 1) % every == 0):
            return {}
        return self.run(ended_epoch=epoch)

    def run(self, *, ended_epoch: int | None = None) -> dict[str, float]:
        """Evaluate now, and report and judge the result; all ranks call this."""
        loop, step = self._loop, self._loop.step
        if ended_epoch is None or self._last[0] != step:  # else a callback has measured these weights
            self._last = (step, self._measured())
            loop.judge("val", self._last[1])
        epoch = loop.epoch if ended_epoch is None else ended_epoch
        loop.report.evaluated(step, epoch, self._last[1], ends_epoch=ended_epoch is not None)
        return self._last[1]

    def _measured(self) -> dict[str, float]:
        loop, limit = self._loop, self._loop.config.limit_val_batches
        assert self._loader is not None, "only with validation data"
        total = batches_to_measure(self._loader, limit)
        with loop.report.phase("evaluate", total), loop.formation.averaged():
            return evaluate(loop.formation, loop.model, self._loader, loop.task.loss_fn, loop.task.metrics, limit)


def batches_to_measure(loader: PreparedLoader, limit: float | None) -> int | None:
    """Return how many batches per rank an evaluation takes; None where the data has no length."""
    length = loader.sharded.steps_per_epoch
    if isinstance(limit, float):
        if length is None:
            raise UsageError(
                f"limit_val_batches = {limit} is a share of the batches, but the data has no length",
                hint="Write a number of batches per rank: limit_val_batches=50.",
            )
        return max(1, round(limit * length))
    return length if limit is None else limit if length is None else min(limit, length)


def _first_batches(loader: PreparedLoader, limit: float | None) -> Iterator[Any]:
    """Yield a rank's first batches; every rank gets as many."""
    batches = iter(loader)
    try:
        yield from itertools.islice(batches, None if limit is None else batches_to_measure(loader, limit))
    finally:
        batches.close()  # type: ignore[attr-defined]


@torch.no_grad()
def predict(formation: Formation, model: nn.Module, loader: PreparedLoader) -> list[tuple[int, Any]]:
    """Return this rank's outputs as (position of the batch's first sample, output on the CPU)."""
    bare = model if formation.strategy.shards else formation.unwrap(model)
    outputs: list[tuple[int, Any]] = []
    with own_modes(bare):
        bare.eval()
        for batch in loader:
            with formation.autocast():
                try:
                    output = model_output(bare, batch)
                except RuntimeError as error:
                    raise_explained(error, bare, batch)
            samples = loader.current.samples
            if samples:
                outputs.append((loader.current.offset, _first(output, samples)))
    return outputs


def model_output(model: nn.Module, batch: Any, *, with_targets: bool = True) -> Any:
    """Call the model on a batch's inputs: of (inputs, targets) the targets are left out, unless forward needs them.

    Without targets, all parts of the batch are inputs.
    """
    if not with_targets:
        result = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    elif isinstance(batch, Mapping):
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
    """Return the rows of real samples (a number as it is), on the CPU and in a dtype that NumPy knows."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        rows = (tensor[:samples] if tensor.ndim else tensor).cpu()
        return rows.float() if rows.dtype == torch.bfloat16 else rows

    return map_batch(output, cut, lambda leaf: isinstance(leaf, torch.Tensor))
