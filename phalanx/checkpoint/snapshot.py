"""What goes into a checkpoint, and what a save tells about the one it published."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at a step boundary.

    `tensors` is a nested state dict (`{"model": {...}, "optimizer": {...}}`) of tensors, DTensors and plain numbers
    with string keys: it loads at any other layout. `rank_state` belongs to this rank alone (random number generators).
    `shared` is JSON-able and equal on all ranks; what rank 0 holds is what is stored. As JSON has it, tuples come back
    as lists and keys as strings.
    """

    step: int
    epoch: int
    tensors: dict[str, Any]
    rank_state: Any = None
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A published checkpoint: where it is, how long the save took, and how many bytes it holds over all ranks."""

    path: Path
    step: int
    seconds: float
    bytes: int
    notes: tuple[str, ...] = ()
    """What the user should hear about, such as an old checkpoint that could not be removed."""
