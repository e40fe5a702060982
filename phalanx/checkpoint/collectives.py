"""Collectives of Python objects for checkpoints, with or without a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx import torch_compat
from phalanx.errors import CheckpointError, PhalanxError
from phalanx.world.abort import raise_if_aborted

T = TypeVar("T")


_used: dist.ProcessGroup | None = None
"""The group of all ranks that the calls here go over; None: the default one."""


@contextmanager
def over(group: dist.ProcessGroup) -> Iterator[None]:
    """Let the calls in the block go over this group of all ranks.

    Numbers and objects are needed on the host: over gloo they do not wait for the device, and an abort wakes a rank
    that waits for a lost one at once.
    """
    global _used
    before, _used = _used, group
    try:
        yield
    finally:
        _used = before


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
    dist.gather_object(item, gathered, dst=0, group=_used)
    return gathered or []


def gather_to_all(item: T) -> list[T]:
    """Return one object of every rank on every rank."""
    if world_size() == 1:
        return [item]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, item, group=_used)
    raise_if_aborted()
    return gathered


def largest(number: int) -> int:
    """Return the largest number of all ranks, by one all-reduce."""
    if world_size() == 1:
        return number
    device = "cuda" if dist.get_backend(_used) == "nccl" else "cpu"
    number_here = torch.tensor([number], dtype=torch.int64, device=device)
    dist.all_reduce(number_here, dist.ReduceOp.MAX, group=_used)
    number = int(number_here)
    raise_if_aborted()
    return number


def from_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0, and return its result or raise its error on every rank."""
    if world_size() == 1:
        return action()
    outcome: list[Any] = [None]
    if rank() == 0:
        outcome = [tried(action)]
    dist.broadcast_object_list(outcome, src=0, group=_used)
    raise_if_aborted()
    return unwrapped(outcome[0])  # type: ignore[no-any-return]


class RankFailure:
    """An error of one rank, on its way to the others."""

    def __init__(self, error: Exception) -> None:
        is_ours = isinstance(error, PhalanxError)  # exceptions of other libraries may not survive pickling
        self.error = error if is_ours else CheckpointError(f"rank {rank()} failed: {type(error).__name__}: {error}")


def tried(action: Callable[[], T]) -> T | RankFailure:
    """Run `action`; return its result, or its error for `unwrapped` on another rank."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - raised again by `unwrapped`
        return RankFailure(error)


def unwrapped(outcome: T | RankFailure) -> T:
    """Return the result of `tried`, or raise its error."""
    if isinstance(outcome, RankFailure):
        raise outcome.error
    return outcome


def on_all(action: Callable[[], T]) -> T:
    """Run `action` on every rank; return this rank's result, or raise the error of the first that failed on all."""
    outcome = tried(action)
    for failed in gather_to_all(outcome if isinstance(outcome, RankFailure) else None):
        unwrapped(failed)
    return unwrapped(outcome)


def scatter_from_zero(action: Callable[[], list[T]]) -> T:
    """Run `action` on rank 0, and return one item of its list, or raise its error, on every rank."""
    if world_size() == 1:
        return action()[0]
    outcome: list[Any] | None = None
    if rank() == 0:
        items = tried(action)
        outcome = [items] * world_size() if isinstance(items, RankFailure) else items
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, outcome, src=0, group=_used)
    return unwrapped(mine[0])  # type: ignore[no-any-return]


def store() -> dist.Store:
    """Return the store of the process group; threads may use it while the group is in use."""
    return torch_compat.default_store()
