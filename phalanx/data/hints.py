"""What a map-style data set may ask of its loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_NAMED = 5


@dataclass(frozen=True, slots=True)
class LoaderHints:
    """What a map-style data set asks of its loader: its attribute `loader_hints`."""

    workers: int = 0
    """Worker processes per rank, where it is given without a DataLoader."""
    groups: Sequence[int] = ()
    """How many consecutive samples are stored together: the lengths of shards or row groups."""
    window: int = 0
    """Groups that are shuffled together; 0: all samples are."""
    notes: tuple[str, ...] = ()
    """Messages for the user before training."""
    problems: Callable[[], list[str]] | None = None
    """Returns the names of samples read so far with which something was wrong; asked on all ranks after an epoch."""
    problem: str = ""
    """What was wrong with them, such as: could not be decoded."""


def describe_problems(names: Sequence[str], problem: str) -> str:
    """Return how many samples had a problem, with the first names; empty where none had."""
    listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{len(names)} sample{'s' * (len(names) > 1)} {problem}: {listed}" if names else ""


def hints_of(dataset: Any) -> LoaderHints:
    """Return what a data set asks of its loader; most ask nothing."""
    hints = getattr(dataset, "loader_hints", None)
    return hints if isinstance(hints, LoaderHints) else LoaderHints()
