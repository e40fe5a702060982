"""How tensors of several ranks become one: the operations, and the one order in which they are applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def combine_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """Combine the ranks' parts into `out`, as the tree T(a, s) = T(a, 2s) + T(a + s, 2s) does from T(0, 1).

    Ranks far from each other come first (0 and n/2, 1 and n/2 + 1, ...): for powers of two this is the order that
    halving gives, and what one rank would get from the same parts.
    """
    combine, count = COMBINE[op], len(parts)

    def subtree(first: int, stride: int, into: torch.Tensor | None) -> torch.Tensor:
        if first + stride >= count:
            return parts[first]
        left, right = subtree(first, 2 * stride, None), subtree(first + stride, 2 * stride, None)
        return combine(left, right, out=into) if into is not None else combine(left, right)

    if count == 1:
        out.copy_(parts[0])
    else:
        subtree(0, 1, out)
    if op == "mean":
        out.mul_(1.0 / count)
