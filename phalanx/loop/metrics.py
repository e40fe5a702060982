"""Losses by name (`loss_fn="mse"`), and metrics over exactly the samples of a split, read from the device once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import ModelError, UsageError, a_type, unknown_name
from phalanx.world.abort import raise_if_aborted

LossFn = Callable[[Any, Any], torch.Tensor]
Metric = Callable[[Any, Any], Any]
"""metric(output, target) -> one value per sample, the mean over the batch, or (total, number of what was counted)."""


class GatheredMetric(Protocol):
    """A metric that is not a mean over samples: the area under a curve, or a score of texts cut into several samples.

    Called with (output, target) it returns some numbers per sample, [samples, numbers]. `combine` gets those of all
    samples of all ranks, each once and in the order of the data set, as float64 on the CPU.
    """

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        """Return the numbers that are kept of each sample of a batch."""

    def combine(self, rows: torch.Tensor, samples: torch.Tensor) -> float | Mapping[str, float]:
        """Return the value, or several by name; `samples` are the places of the rows in the data set."""


def is_gathered(metric: Any) -> TypeGuard[GatheredMetric]:
    """Whether a metric combines what it found in all samples."""
    return callable(getattr(metric, "combine", None))


class MetricSums:
    """Adds up the loss and the metrics of this rank's samples; `result` makes them means over all ranks.

    Of a `GatheredMetric` the rows are kept, and combined in `result`.
    """

    def __init__(
        self, metrics: Mapping[str, Metric] | None, device: torch.device, *, leads_samples: bool = True
    ) -> None:
        """`leads_samples`: False on a rank whose samples another one has as well, and keeps the rows of."""
        self._metrics = metrics
        self._device = device
        self._leads_samples = leads_samples
        self._sums: dict[str, torch.Tensor] = {}
        self._rows: dict[str, list[torch.Tensor]] = {}

    def add(
        self,
        loss: torch.Tensor | None,
        output: Any,
        target: Any,
        samples: int,
        weight: float | torch.Tensor | None = None,
        *,
        may_shift: bool = False,
        offset: int = 0,
    ) -> None:
        """Count one batch of which `samples` are real; `weight` is that of its loss, if not its samples.

        `may_shift`: the loss is the model's own, and may compare outputs with later labels. `offset`: the place of the
        first sample in the data set.
        """
        if loss is not None:
            units = torch.as_tensor(float(samples) if weight is None else weight, dtype=torch.float64).to(loss.device)
            # The mean over no label at all is NaN, and counts for nothing.
            self._accumulate("loss", torch.where(units > 0, loss.detach().double() * units, 0.0), units)
        if self._metrics is None:
            self._metrics = default_metrics(output, target, loss if may_shift else None)
        for name, metric in self._metrics.items():
            try:
                value = metric(output, target)
            except Exception as error:
                error.add_note(f"It was raised by the metric '{name}'.")
                raise
            if is_gathered(metric):
                self._keep(name, value, samples, offset)
            else:
                self._accumulate(name, *self._measured(name, value, samples))

    def _keep(self, name: str, value: Any, samples: int, offset: int) -> None:
        """Keep the rows of the real samples on the device, each after the place of its sample."""
        if not isinstance(value, torch.Tensor) or value.ndim != 2 or len(value) < samples:
            shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ModelError(
                f"the metric '{name}', which combines rows, returned {shape} for a batch of {samples} samples",
                hint=f"Return some numbers per sample, a tensor [{samples}, numbers]: torch.stack([score, label], 1)",
            )
        rows = value[: samples if self._leads_samples else 0].detach().to(self._device, torch.float64)
        places = torch.arange(offset, offset + len(rows), device=self._device, dtype=torch.float64)
        self._rows.setdefault(name, []).append(torch.cat([places[:, None], rows], dim=1))

    def _measured(self, name: str, result: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the total of what a metric found, and the number of what it counted."""
        if isinstance(result, tuple) and len(result) == 2:  # a placeholder batch counts nothing
            total, units = (_as_numbers(name, part).detach().double() * float(samples > 0) for part in result)
            return total, units
        value = _as_numbers(name, result).to(self._device).detach().double()
        if value.ndim and samples and (value.shape[0], value.numel()) != (samples, samples):
            raise ModelError(
                f"the metric '{name}' returned values of shape {list(value.shape)} for a batch of {samples} samples",
                hint=f"Return the batch's mean (.mean()), one value per sample ([{samples}]), or (total, count): "
                "return hits.sum(), hits.numel()",
            )
        # The mean over a placeholder batch may be NaN, and counts for nothing.
        total = value.sum() if value.ndim else value * samples
        return total if samples else torch.zeros(()), torch.tensor(float(samples))

    def _accumulate(self, name: str, total: torch.Tensor, units: torch.Tensor) -> None:
        row = torch.stack([total.to(self._device), units.to(self._device, torch.float64)])
        self._sums[name] = self._sums[name] + row if name in self._sums else row

    def result(self, unclear: list[str] | None = None) -> dict[str, float]:
        """Return the means over every sample of every rank; all ranks must call this.

        `unclear`: gets the names of metrics whose `combine` fails, instead of the error.
        """
        names = sorted(self._sums)
        if not names and not self._rows:
            raise ModelError("evaluation produced neither a loss nor a metric", hint="Give loss_fn or metrics.")
        results: dict[str, float] = {}
        if names:
            totals = torch.stack([self._sums[name] for name in names])
            if dist.is_initialized():
                dist.all_reduce(totals)
            results = dict(zip(names, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))
        for name in sorted(self._rows):
            rows = _gathered(torch.cat(self._rows[name]))
            try:
                results |= self._combined(name, rows)
            except Exception:
                if unclear is None:
                    raise
                unclear.append(name)
        raise_if_aborted()  # else a part of a sum
        return results

    def _combined(self, name: str, rows: torch.Tensor) -> dict[str, float]:
        assert self._metrics is not None, "it has rows"
        metric: Any = self._metrics[name]
        rows = rows[rows[:, 0].argsort()]
        value = metric.combine(rows[:, 1:], rows[:, 0].long())
        several = value if isinstance(value, Mapping) else {name: value}
        return {key: float(score) for key, score in several.items()}


def _as_numbers(name: str, value: Any) -> torch.Tensor:
    """Return what a metric returned as a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the metric '{name}' returned {a_type(value)}, {repr(value)[:40]}, which is not a number",
            hint="Return the batch's mean, one value per sample, or (total, count); give several values as several "
            "metrics.",
        ) from error


def _gathered(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, of which each has another number, on the CPU; all ranks call this."""
    if not dist.is_initialized():
        return rows.cpu()
    counts = rows.new_zeros(dist.get_world_size(), dtype=torch.int64)
    counts[dist.get_rank()] = len(rows)
    dist.all_reduce(counts)
    lengths = counts.tolist()
    padded = rows.new_zeros(max(lengths), rows.shape[1])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]).cpu()


def default_metrics(output: Any, target: Any, model_loss: torch.Tensor | None = None) -> dict[str, Metric]:
    """Return accuracy where outputs are class scores for integer labels, else nothing.

    `model_loss`: the loss of a model that computes it itself. For sequences, it may compare each label with the scores
    of the same position or of the one before; its value shows which. All ranks call this together.
    """
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return {}
    labels = not target.is_floating_point() and target.dtype != torch.bool
    if not labels or output.ndim != target.ndim + 1 or not output.is_floating_point():
        return {}
    metric: Metric | None = accuracy
    if model_loss is not None and target.ndim > 1:
        metric = _alignment(output, target, model_loss)
    return {} if metric is None else {"accuracy": metric}


_TOLERANCE = 1e-3
"""Relative; half precision in the model's own loss stays well below it."""


def _alignment(output: torch.Tensor, target: torch.Tensor, model_loss: torch.Tensor) -> Metric | None:
    """Return the accuracy whose labels are those of the model's loss; None where neither explains the loss."""
    errors = torch.full((2,), math.inf, dtype=torch.float64, device=output.device)
    if target.ndim == 2 and output.shape[:-1] == target.shape:
        pairs = ((output, target), (output[:, :-1], target[:, 1:]))
        losses = torch.stack([_cross_entropy(*pair) for pair in pairs])
        errors = (
            ((losses - model_loss.double()) / model_loss.double()).abs().nan_to_num(0.0)
        )  # NaN: no label in the batch
    if dist.is_initialized():
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    aligned, shifted = errors.tolist()
    if min(aligned, shifted) > _TOLERANCE:
        return None
    return token_accuracy if aligned <= shifted else next_token_accuracy


def _cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean over all labels, row by row: scores in float32 for a whole batch may not fit on a GPU."""
    labels = target.long().masked_fill(target < 0, IGNORED_LABEL)  # nanoGPT ignores -1
    sums = [
        F.cross_entropy(scores.float(), row, ignore_index=IGNORED_LABEL, reduction="sum").double()
        for scores, row in zip(output, labels, strict=True)
    ]
    return torch.stack(sums).sum() / (labels != IGNORED_LABEL).sum()


def next_token_accuracy(output: torch.Tensor, target: torch.Tensor) -> Any:
    """Return hits and labels where the scores of each position are for the label after it."""
    return token_accuracy(output[:, :-1], target[:, 1:])


def token_accuracy(output: torch.Tensor, target: torch.Tensor) -> Any:
    """Return hits and labels where the classes are the last dimension of the scores."""
    return accuracy(output, target, -1)


def accuracy(output: torch.Tensor, target: torch.Tensor, classes: int | None = None) -> Any:
    """Return how often the highest score is right, and the number of labels; those below 0 do not count."""
    valid = target >= 0
    hits = output.argmax(dim=class_axis(output, target) if classes is None else classes) == target
    return (hits & valid).sum(), valid.sum()


def whole_accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return 1 for each sequence all of whose labels have the highest score: greedy decoding writes these exactly."""
    return ((output.argmax(-1) == target) | (target < 0)).all(1).float()


def top5_accuracy(output: torch.Tensor, target: torch.Tensor) -> Any:
    """Return how often the label is among the five highest of scores [samples, classes], and the number of labels."""
    highest = output.topk(min(5, output.shape[1]), dim=1).indices
    valid = target >= 0
    return ((highest == target[:, None]).any(1) & valid).sum(), valid.sum()


def class_axis(output: torch.Tensor, target: torch.Tensor) -> int:
    """Return the dimension of scores that holds the classes: 1, as torch has it, or the last where only that fits."""
    shape, labels = output.shape, target.shape
    if len(labels) < 2 or shape[:-1] != labels:
        return 1
    if shape[:1] + shape[2:] != labels:
        return -1
    warnings.warn(
        f"scores {list(shape)} for labels {list(labels)}: the classes are taken to be in dimension 1, as in torch. "
        "If they are in the last: loss_fn=lambda o, t: F.cross_entropy(o.flatten(0, -2), t.flatten())",
        stacklevel=2,
    )
    return 1


def cross_entropy(output: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the cross entropy of scores and labels, or shares of classes.

    For sequences the classes may be in the last dimension.
    """
    if not target.is_floating_point() and class_axis(output, target) == -1:
        output, target = output.flatten(0, -2), target.flatten()
    return F.cross_entropy(output, target, label_smoothing=label_smoothing)


_BROADCASTING = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss)
_BROADCASTING_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss)
"""Losses of torch's that broadcast output and target: [n, 1] and [n] make n x n differences, which train nothing."""


def refuse_broadcast(loss_fn: Any) -> Any:
    """Return a loss that raises for outputs and targets which torch would broadcast; others as they are."""
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    broadcasts = type(function) in _BROADCASTING_MODULES or any(function is kind for kind in _BROADCASTING)
    return partial(_of_equal_shapes, loss_fn) if broadcasts else loss_fn


def _of_equal_shapes(loss_fn: LossFn, output: Any, target: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor) and output.shape != target.shape:
        _refuse_shapes(loss_fn, output.shape, target.shape)
    return loss_fn(output, target)


def _refuse_shapes(loss_fn: Any, output: torch.Size, target: torch.Size) -> None:
    """Raise if torch would broadcast these shapes; if it cannot, its own error names them."""
    try:
        pairs = torch.broadcast_shapes(output, target)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return
    inner = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    name = getattr(inner, "__name__", type(inner).__name__)
    hint = "Give outputs and targets of one shape."
    if output == (*target, 1):
        hint = "Write output.squeeze(-1) at the end of the model's forward, or give target.unsqueeze(-1) in the data."
        if (loss_name := _loss_name(name)) in LOSSES:
            hint += f" Or loss_fn='{loss_name}', which compares them one by one."
    elif target == (*output, 1):
        hint = "Give target.squeeze(-1) in the data, or write output.unsqueeze(-1) at the end of the model's forward."
    raise ModelError(
        f"the outputs are {list(output)} and the targets {list(target)}: {name} would compare each with several "
        f"others, {list(pairs)}",
        hint=hint,
    )


def _pointwise(loss_fn: LossFn, output: Any, target: Any) -> torch.Tensor:
    """Compare each output with its target; as without a loss_fn, outputs may have one more dimension of size 1."""
    if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor) and output.shape != target.shape:
        if output.shape == (*target.shape, 1):
            output = output.squeeze(-1)
        else:
            _refuse_shapes(loss_fn, output.shape, target.shape)
    return loss_fn(output, target)


LOSSES: dict[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "mse": partial(_pointwise, F.mse_loss),
    "l1": partial(_pointwise, F.l1_loss),
    "smooth_l1": partial(_pointwise, F.smooth_l1_loss),
    "huber": partial(_pointwise, F.huber_loss),
    "bce": partial(_pointwise, F.binary_cross_entropy),
    "bce_with_logits": partial(_pointwise, F.binary_cross_entropy_with_logits),
    "nll": F.nll_loss,
}
_SAME = {
    "mae": "l1",
    "ce": "cross_entropy",
    "crossentropy": "cross_entropy",
    "categorical_crossentropy": "cross_entropy",
    "sparse_categorical_crossentropy": "cross_entropy",
    "mean_squared_error": "mse",
    "mean_absolute_error": "l1",
    "binary_cross_entropy": "bce",
    "binary_crossentropy": "bce",
    "bcewithlogits": "bce_with_logits",
    "smoothl1": "smooth_l1",
}
"""Names of torch's classes and of other libraries."""


def _loss_name(alias: str) -> str:
    """Return the name in `LOSSES` of a name of torch's or of another library's; an unknown one nearly as it is."""
    name = alias.lower().replace("-", "_").removesuffix("loss").rstrip("_")
    return _SAME.get(name, name)


def find_loss(loss: Any) -> LossFn | None:
    """Return the loss function of a name, or the one given; raise for what cannot be called with (output, target)."""
    hint = f"Give one of {', '.join(LOSSES)}, or a function: loss_fn=lambda output, target: ..."
    if isinstance(loss, str):
        name = _loss_name(loss)
        if name not in LOSSES:
            raise UsageError(unknown_name("loss", loss, LOSSES), hint="Or give a function: loss_fn=lambda o, t: ...")
        return LOSSES[name]
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise UsageError(
            f"loss_fn = {loss.__name__} is the class, not a loss", hint=f"Write: loss_fn={loss.__name__}()"
        )
    if loss is not None and not callable(loss):
        raise UsageError(f"loss_fn = {loss!r} is {a_type(loss)}, which cannot be called", hint=hint)
    return loss  # type: ignore[no-any-return]
