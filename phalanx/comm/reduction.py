"""The operations that combine the ranks' values, and the dtypes that each supports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from phalanx.errors import UsageError, unknown_name


@dataclass(frozen=True)
class Reduction:
    """How two values are combined; a mean is a sum that is divided once, at the end."""

    name: str
    function: Callable[..., torch.Tensor]

    def combine(self, into: torch.Tensor, other: torch.Tensor) -> None:
        """Combine two values in place of the first."""
        self.function(into, other, out=into)

    def finish(self, total: torch.Tensor, ranks: int) -> None:
        """Compute the result from the combined values; called once per element, by one rank."""
        if self.name == "mean":
            total.div_(ranks)


OPS = {
    "sum": Reduction("sum", torch.add),
    "mean": Reduction("mean", torch.add),
    "min": Reduction("min", torch.minimum),
    "max": Reduction("max", torch.maximum),
    "prod": Reduction("prod", torch.mul),
    "band": Reduction("band", torch.bitwise_and),
    "bor": Reduction("bor", torch.bitwise_or),
    "bxor": Reduction("bxor", torch.bitwise_xor),
}
"""The reductions by name. On booleans, sum and max mean "any", prod and min mean "all"."""


def find_reduction(op: str, dtype: torch.dtype) -> Reduction:
    """Return the operation of a name; UsageError where the dtype does not have it."""
    if op not in OPS:
        raise UsageError(unknown_name("reduction", op, OPS))
    dtype_name = str(dtype).removeprefix("torch.")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"the mean of {dtype_name} numbers is not a {dtype_name} number",
            hint="Convert to float32 first, or use op='sum'.",
        )
    if op in ("min", "max") and dtype.is_complex:
        raise UsageError(f"{op} is not defined for {dtype_name}", hint="Reduce their abs() or real part.")
    if op in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"{op} is not defined for {dtype_name}", hint="Use whole numbers or booleans.")
    return OPS[op]


def combine_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """Combine all ranks' values in one process, in the order of `fixed_order`: the tree T(0, 1) over ranks."""
    reduction = OPS[op]
    if len(parts) == 2:
        reduction.function(parts[0], parts[1], out=out)
        reduction.finish(out, 2)
        return

    def branch(first: int, stride: int, into: torch.Tensor | None) -> torch.Tensor:
        if first + stride >= len(parts):
            return parts[first]
        left, right = branch(first, 2 * stride, None), branch(first + stride, 2 * stride, None)
        return reduction.function(left, right) if into is None else reduction.function(left, right, out=into)

    if len(parts) == 1:
        out.copy_(parts[0])
    else:
        branch(0, 1, out)
    reduction.finish(out, len(parts))
