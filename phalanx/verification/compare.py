"""Two recordings side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.verification.report import MEASURES, Comparison, ModuleRow, StepRow

if TYPE_CHECKING:
    import torch

    from phalanx.verification.probe import Recording, Tensors

_FLOOR = 1e-2
"""A tensor whose largest value is below this share of the largest of all is measured by that share instead.

Some gradients are zero in exact arithmetic (a bias before a softmax or a normalisation): what is left of them is
rounding, and relative to itself rounding always differs.
"""


def compare(
    title: str,
    reference: Recording,
    other: Recording,
    limits: Mapping[str, float] | float,
    *,
    labels: tuple[str, str] = ("one process", "layout"),
) -> Comparison:
    """Return how far `other` is from `reference`, by step and by module, and how far it may be."""
    allowed = dict.fromkeys(MEASURES, limits) if isinstance(limits, float) else dict(limits)
    return Comparison(title, labels, _steps(reference, other), _modules(reference, other), allowed)


def same_bits(mine: Tensors, theirs: Tensors) -> str | None:
    """Return the first tensor that is not equal to the last bit, or None."""
    for name, tensor in mine.items():
        other = theirs.get(name)
        if other is None or other.dtype != tensor.dtype or not bool(tensor.eq(other).all()):
            return name
    return next((name for name in theirs if name not in mine), None)


def _steps(reference: Recording, other: Recording) -> list[StepRow]:
    theirs = {row["step"]: row for row in other.steps}
    nothing = {"loss": math.nan, "grad_norm": math.nan}
    return [
        StepRow(
            row["step"],
            (row["loss"], theirs.get(row["step"], nothing)["loss"]),
            (row["grad_norm"], theirs.get(row["step"], nothing)["grad_norm"]),
        )
        for row in reference.steps
    ]


def _modules(reference: Recording, other: Recording) -> list[ModuleRow]:
    # A layout that cuts layers or batches further than over data ranks has no outputs that could be compared.
    comparable = reference.activations if other.activations else {}
    activations = {
        name: _fingerprint_difference(mine, other.activations.get(name)) for name, mine in comparable.items()
    }
    gradients = _by_module(_differences(reference.gradients, other.gradients))
    weights = _by_module(_differences(reference.after, other.after))
    return [
        ModuleRow(name, kind, activations.get(name), gradients.get(name), weights.get(name))
        for name, kind in reference.modules.items()
    ]


def _fingerprint_difference(mine: tuple[float, float], theirs: tuple[float, float] | None) -> float:
    if theirs is None:
        return math.inf
    size = max(mine[1], theirs[1])
    if size == 0:
        return 0.0
    return _or_infinite(max(abs(mine[0] - theirs[0]) / math.sqrt(size), abs(mine[1] - theirs[1]) / size))


def _differences(mine: Tensors, theirs: Tensors) -> dict[str, float]:
    """Return each tensor's largest difference, relative to its largest value."""
    largest = max((float(tensor.abs().max()) for tensor in mine.values() if tensor.numel()), default=0.0)
    return {name: _difference(tensor, theirs.get(name), largest * _FLOOR) for name, tensor in mine.items()}


def _difference(mine: torch.Tensor, theirs: torch.Tensor | None, floor: float) -> float:
    if theirs is None or theirs.shape != mine.shape:
        return math.inf
    if mine.numel() == 0:
        return 0.0
    apart = float((mine.double() - theirs.double()).abs().max())
    return 0.0 if apart == 0 else _or_infinite(apart / max(float(mine.abs().max()), floor, math.ulp(0.0)))


def _or_infinite(value: float) -> float:
    """A NaN is as far away as can be."""
    return math.inf if math.isnan(value) else value


def _by_module(differences: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, difference in differences.items():
        module = name.rpartition(".")[0]
        found[module] = max(difference, found.get(module, 0.0))
    return found
