"""Compare two recordings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.tools.verify.report import MEASURES, Comparison, ModuleRow, StepRow

if TYPE_CHECKING:
    import torch

    from phalanx.tools.verify.probe import Recording, Tensors

_FLOOR = 1e-2
"""A tensor whose largest value is below this share of the largest of all is measured by that share instead.

Some gradients are zero in exact arithmetic (a bias before a softmax or a normalisation): the rest is
rounding, whose relative difference is always large.
"""

FLOAT64 = 1e-10
FLOAT32 = 1e-5
_ROUNDINGS = 10
"""A layout may be this many times as far from one process as rounding alone takes one process from itself."""
_FINER = 2.0**-29
"""Float64 has 29 bits more than float32: the effect of rounding in one is known from the other."""


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


def limits_of(exact: Recording, rounded: Recording) -> tuple[dict[str, float], dict[str, float]]:
    """Return how far two float64 and two float32 runs may be apart, from one run in both precisions.

    Where a gradient is zero but for rounding, Adam divides rounding by rounding: such weights differ more than 1e-10
    between any two runs, and float32 shows it.
    """
    rounding = compare("rounding", exact, rounded, 0.0).worst
    fine = {measure: max(FLOAT64, _ROUNDINGS * rounding[measure] * _FINER) for measure in MEASURES}
    return fine, {measure: max(FLOAT32, _ROUNDINGS * rounding[measure]) for measure in MEASURES}


def same_bits(first: Tensors, second: Tensors) -> str | None:
    """Return the first tensor that is not equal to the last bit, or None."""
    for name, tensor in first.items():
        other = second.get(name)
        if other is None or other.dtype != tensor.dtype or not bool(tensor.eq(other).all()):
            return name
    return next((name for name in second if name not in first), None)


def largest_difference(first: Tensors, second: Tensors) -> float:
    """Return the largest difference of any tensor, relative to its largest value."""
    return max(_differences(first, second).values(), default=0.0)


def _steps(reference: Recording, other: Recording) -> list[StepRow]:
    second = {row["step"]: row for row in other.steps}
    nothing = {"loss": math.nan, "grad_norm": math.nan}
    return [
        StepRow(
            row["step"],
            (row["loss"], second.get(row["step"], nothing)["loss"]),
            (row["grad_norm"], second.get(row["step"], nothing)["grad_norm"]),
        )
        for row in reference.steps
    ]


def _modules(reference: Recording, other: Recording) -> list[ModuleRow]:
    # A layout that cuts layers or batches further than over data ranks has no outputs that could be compared.
    comparable = reference.activations if other.activations else {}
    activations = {
        name: _fingerprint_difference(first, other.activations.get(name)) for name, first in comparable.items()
    }
    gradients = _by_module(_differences(reference.gradients, other.gradients))
    weights = _by_module(_differences(reference.after, other.after))
    return [
        ModuleRow(name, kind, activations.get(name), gradients.get(name), weights.get(name))
        for name, kind in reference.modules.items()
    ]


def _fingerprint_difference(first: tuple[float, float], second: tuple[float, float] | None) -> float:
    if second is None:
        return math.inf
    size = max(first[1], second[1])
    if size == 0:
        return 0.0
    return _or_infinite(max(abs(first[0] - second[0]) / math.sqrt(size), abs(first[1] - second[1]) / size))


def _differences(first: Tensors, second: Tensors) -> dict[str, float]:
    """Return each tensor's largest difference, relative to its largest value."""
    largest = max((float(tensor.abs().max()) for tensor in first.values() if tensor.numel()), default=0.0)
    return {name: _difference(tensor, second.get(name), largest * _FLOOR) for name, tensor in first.items()}


def _difference(first: torch.Tensor, second: torch.Tensor | None, floor: float) -> float:
    if second is None or second.shape != first.shape:
        return math.inf
    if first.numel() == 0:
        return 0.0
    apart = float((first.double() - second.double()).abs().max())
    return 0.0 if apart == 0 else _or_infinite(apart / max(float(first.abs().max()), floor, math.ulp(0.0)))


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _by_module(differences: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, difference in differences.items():
        module = name.rpartition(".")[0]
        found[module] = max(difference, found.get(module, 0.0))
    return found
