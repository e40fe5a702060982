"""The operations by which ranks' values become one, and what each can be asked of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from phalanx.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Reduction:
    """How two values become one, in place of the first; a mean is a sum that is divided once, at the end."""

    name: str
    combine: Callable[[torch.Tensor, torch.Tensor], object]

    def finish(self, total: torch.Tensor, ranks: int) -> None:
        """Make the result of what all ranks' values have become. Called once for each element, by one rank."""
        if self.name == "mean":
            total.div_(ranks)


def _minimum(into: torch.Tensor, other: torch.Tensor) -> None:
    torch.minimum(into, other, out=into)


def _maximum(into: torch.Tensor, other: torch.Tensor) -> None:
    torch.maximum(into, other, out=into)


OPS = {
    "sum": Reduction("sum", torch.Tensor.add_),
    "mean": Reduction("mean", torch.Tensor.add_),
    "min": Reduction("min", _minimum),
    "max": Reduction("max", _maximum),
    "prod": Reduction("prod", torch.Tensor.mul_),
}
"""The reductions by name. On booleans, sum and max mean "any", prod and min mean "all"."""


def find_reduction(op: str, dtype: torch.dtype) -> Reduction:
    """Return the operation of that name, or say why it cannot be had on such numbers."""
    if op not in OPS:
        raise UsageError(unknown_name("reduction", op, OPS))
    shown = str(dtype).removeprefix("torch.")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"the mean of {shown} numbers is no {shown} number", hint="Convert to float32 first, or take op='sum'."
        )
    if op in ("min", "max") and dtype.is_complex:
        raise UsageError(f"{shown} numbers have no order, so no {op}", hint="Reduce their abs() or real part.")
    return OPS[op]
