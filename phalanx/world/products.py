"""Products of axes that do not fit a number of ranks, and those nearest to them that do."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SHOWN = 3
"""How many possible products an error lists."""


def impossible_product(wanted: Mapping[str, int], ranks: int) -> UsageError:
    """Say that a copy of the model over these axes does not divide the ranks, and list the nearest that do."""
    asked = {axis: size for axis, size in wanted.items() if size > 1}
    copy = math.prod(asked.values())
    product = " x ".join(f"{axis} = {size}" for axis, size in asked.items())
    takes = f" = {copy} ranks for one copy of the model" if len(asked) > 1 else ""
    near = "; ".join(_words(sizes, ranks) for sizes in nearest_products(asked, ranks)[:SHOWN])
    more = -(-ranks // copy) * copy
    return UsageError(
        f"{ranks} rank{'s' * (ranks != 1)} cannot be divided by {product}{takes}",
        hint=f"Possible with {ranks}: {near}. Or start a multiple of {copy} ranks: --num-workers {more}.",
    )


def nearest_products(asked: Mapping[str, int], ranks: int) -> list[dict[str, int]]:
    """Return the sizes of these axes whose product divides the ranks, the nearest to what was asked first."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    possible = [
        dict(zip(asked, sizes, strict=True))
        for sizes in itertools.product(divisors, repeat=len(asked))
        if ranks % math.prod(sizes) == 0
    ]
    return sorted(possible, key=lambda sizes: (_distance(asked, sizes), tuple(-size for size in sizes.values())))


def _distance(asked: Mapping[str, int], sizes: Mapping[str, int]) -> float:
    """Twice as many is as far away as half as many."""
    return sum(abs(math.log2(sizes[axis] / size)) for axis, size in asked.items())


def _words(sizes: Mapping[str, int], ranks: int) -> str:
    data = ranks // math.prod(sizes.values())
    return _joined(f"{axis} = {size}" for axis, size in sizes.items()) + (f" (x {data} data ranks)" if data > 1 else "")


def _joined(parts: Iterable[str]) -> str:
    return " x ".join(parts)
