"""GLUE metrics that are not averages over samples: F1, Matthews' correlation, Pearson's and Spearman's.

Each keeps two numbers per sample, its prediction and its label, and is computed over the samples of all ranks. Given to
a `Trainer` as `metrics={"f1": F1()}`, in a recipe or on the command line by name: `--set metrics.f1=f1`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.config.option import limited
from phalanx.errors import ModelError, UsageError, unknown_name
from phalanx.loop.metrics import accuracy, token_accuracy, top5_accuracy, whole_accuracy
from phalanx.recipes.imports import is_import_path, load_import

_AVERAGES = ("binary", "macro", "micro")
_TWO = 2


class F1:
    """The harmonic mean of precision and recall of a class.

    `average`: "binary": F1 of the class `positive`, by default the second of two; "macro": the mean over all classes;
    "micro": over all samples, which is the accuracy if each sample has one class.
    """

    @limited(positive={"minimum": 0})
    def __init__(self, *, average: str = "binary", positive: int | None = None) -> None:
        if average not in _AVERAGES:
            raise UsageError(unknown_name("average", average, _AVERAGES, of="F1"))
        self._average, self._positive = average, positive

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the predicted class and the label of each sample."""
        rows = _classes(output, target, "f1")
        if self._average == "binary" and self._positive is None and output.shape[1] > _TWO:
            raise UsageError(
                f"f1 scores one of two classes, and the model has {output.shape[1]}",
                hint="Write: --set metrics.f1=macro_f1, or in Python name the class that F1 scores.",
            )
        return rows

    def combine(self, rows: Tensor, samples: Tensor) -> float:
        """Return F1; 0 if no sample of a class is predicted or labelled, as scikit-learn has it."""
        predicted, label = rows.unbind(1)
        if self._average == "binary":
            positive = 1 if self._positive is None else self._positive
            return _f1(predicted == positive, label == positive)
        if self._average == "micro":
            return float((predicted == label).double().mean())
        classes = torch.unique(torch.cat([predicted, label])).tolist()
        return sum(_f1(predicted == number, label == number) for number in classes) / len(classes)


class MacroF1(F1):
    """The mean of the F1 of all classes."""

    def __init__(self) -> None:
        super().__init__(average="macro")


class Matthews:
    """Matthews' correlation coefficient of predicted classes and labels, from -1 to 1, for two or more classes."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the predicted class and the label of each sample."""
        return _classes(output, target, "mcc")

    def combine(self, rows: Tensor, samples: Tensor) -> float:
        """Return the coefficient; 0 if all predictions, or all labels, are the same."""
        predicted, label = rows.unbind(1)
        classes: Tensor = torch.unique(torch.cat([predicted, label]))
        guesses, truths = ((values[:, None] == classes).double().sum(0) for values in (predicted, label))
        count, hits = float(len(rows)), float((predicted == label).sum())
        spread = (count**2 - float(guesses @ guesses)) * (count**2 - float(truths @ truths))
        return (hits * count - float(guesses @ truths)) / math.sqrt(spread) if spread else 0.0


class Pearson:
    """Pearson's correlation of predicted numbers and targets."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the predicted number and the target of each sample."""
        return _numbers(output, target, "pearson")

    def combine(self, rows: Tensor, samples: Tensor) -> float:
        """Return the correlation; NaN if all predictions, or all targets, are the same."""
        return _correlation(rows)


class Spearman:
    """Spearman's correlation: Pearson's of the ranks, where equal numbers share the mean of theirs."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the predicted number and the target of each sample."""
        return _numbers(output, target, "spearman")

    def combine(self, rows: Tensor, samples: Tensor) -> float:
        """Return the correlation; NaN if all predictions, or all targets, are the same."""
        return _correlation(torch.stack([_mean_ranks(column) for column in rows.unbind(1)], 1))


METRICS: dict[str, Callable[..., Any]] = {
    "accuracy": accuracy,
    "f1": F1,
    "macro_f1": MacroF1,
    "mcc": Matthews,
    "pearson": Pearson,
    "spearman": Spearman,
    "token_accuracy": token_accuracy,
    "top5_accuracy": top5_accuracy,
    "whole_accuracy": whole_accuracy,
}
"""Metrics by the names that recipes and the command line take."""


def find_metric(text: str, key: str) -> Any:
    """Return a metric by its name or import path: a function, or an object of a class; `key`: its name in results."""
    if is_import_path(text):
        metric: Any = load_import(text, f"metrics.{key}")
    elif text in METRICS:
        metric = METRICS[text]
    else:
        raise UsageError(
            f"metrics.{key}: {unknown_name('metric', text, METRICS)}",
            hint=f"Write your own as package.module:function: --set metrics.{key}=my_metrics:{key}",
        )
    return metric() if inspect.isclass(metric) else metric


def _classes(output: Any, target: Any, name: str) -> Tensor:
    is_scores = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1
    if not is_scores or not isinstance(target, Tensor) or target.ndim != 1 or target.is_floating_point():
        raise ModelError(
            f"the metric '{name}' takes scores [samples, classes] and labels [samples], and got "
            f"{_shape(output)} and {_shape(target)}"
        )
    return torch.stack([output.argmax(1), target], 1)


def _numbers(output: Any, target: Any, name: str) -> Tensor:
    are_tensors = isinstance(output, Tensor) and isinstance(target, Tensor)
    if not are_tensors or not output.numel() == target.numel() == len(target):
        raise ModelError(
            f"the metric '{name}' takes a number and a target per sample, and got {_shape(output)} and {_shape(target)}"
        )
    return torch.stack([output.double().reshape(-1), target.double().reshape(-1)], 1)


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _f1(predicted: Tensor, labelled: Tensor) -> float:
    counted = float(predicted.sum() + labelled.sum())
    return 2 * float((predicted & labelled).sum()) / counted if counted else 0.0


def _correlation(rows: Tensor) -> float:
    first, second = (rows - rows.mean(0)).unbind(1)
    spread = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / spread if spread else math.nan


def _mean_ranks(values: Tensor) -> Tensor:
    """Return the place of each value in sorted order; equal ones get the mean of their places."""
    group: Tensor
    _, group, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    mean: Tensor = last - (counts.double() - 1) / 2
    return mean[group]
