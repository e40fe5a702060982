"""Collectives of Python objects for checkpoints, with or without a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx.errors import CheckpointError, PhalanxError

T = TypeVar("T")


def has_peers() -> bool:
    """Whether a process group exists, so that calls here are collective."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if has_peers() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if has_peers() else 1


def gather_to_zero(item: T) -> list[T]:
    """Return one object of every rank on rank 0, and an empty list on the others."""
    if world_size() == 1:
        return [item]
    gathered: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(item, gathered, dst=0)
    return gathered or []


def gather_to_all(item: T) -> list[T]:
    """Return one object of every rank on every rank."""
    if world_size() == 1:
        return [item]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, item)
    return gathered


def from_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0, and return its result or raise its error on every rank."""
    if world_size() == 1:
        return action()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            # Exceptions of other libraries may not survive pickling.
            known = isinstance(error, PhalanxError)
            shown = error if known else CheckpointError(f"rank 0 failed: {type(error).__name__}: {error}")
            dist.broadcast_object_list([None, shown], src=0)
            raise shown from error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]  # type: ignore[no-any-return]
