"""The part of a data set that is held out for validation."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from phalanx.errors import UsageError

_KEPT = ("classes", "deterministic", "vocab_size", "loader_hints", "fit_to")
"""What a part has from its data set."""


def check_fraction(fraction: float, split: str) -> None:
    """Refuse a `val_fraction` that is not a share, or leaves nothing to train on; 1 is for data to be measured."""
    if not 0 <= fraction <= 1 or (fraction == 1 and split == "train"):
        raise UsageError(f"val_fraction = {fraction!r}: must be from 0 to below 1")


def held_out(length: int, part: str | None, fraction: float) -> list[int] | None:
    """Return the samples of a part; None for all. Every n-th is for validation: sorted files are split evenly."""
    if part is None or fraction in (0, 1):
        return None if part is None or (part == "val") == (fraction == 1) else []
    every = max(2, round(1 / fraction))
    return [number for number in range(length) if (number % every == every - 1) == (part == "val")]


def held_out_part(rows: Any, part: str | None, fraction: float) -> Any:
    """Return a part of the samples as a data set."""
    chosen = held_out(len(rows), part, fraction)
    if chosen is None:
        return rows
    part_of_rows = Subset(rows, chosen)
    for name in _KEPT:
        if hasattr(rows, name):
            setattr(part_of_rows, name, getattr(rows, name))
    return part_of_rows
