"""Shared memory where it can be had: all ranks on one machine, and room for it in /dev/shm; else a word about it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from phalanx.comm.shared.exchange import SharedExchange
from phalanx.comm.shared.group import SharedGroup
from phalanx.comm.shared.machine import on_one_machine
from phalanx.comm.shared.pages import SharedMemoryUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

_Made = TypeVar("_Made")


def share_memory(store: dist.Store, rank: int, size: int, *, timeout: float) -> SharedGroup | None:
    """Return the shared memory of a group whose ranks are all on this machine, else None; all ranks call this."""
    return _try_to_share(store, rank, size, lambda fresh: SharedGroup(fresh, rank, size, timeout=timeout))


def share_gradients(
    store: dist.Store, rank: int, size: int, nbytes: int, *, timeout: float
) -> tuple[SharedExchange, torch.Tensor] | None:
    """Return an exchange of the ranks of this machine, and so many bytes that lie in the memory they share, or None."""

    def share(fresh: dist.Store) -> tuple[SharedExchange, torch.Tensor]:
        group = SharedGroup(fresh, rank, size, timeout=timeout)
        return SharedExchange(group), group.empty(nbytes, torch.uint8)

    return _try_to_share(store, rank, size, share)


def _try_to_share(store: dist.Store, rank: int, size: int, share: Callable[[dist.Store], _Made]) -> _Made | None:
    if not on_one_machine(store, rank, size):
        return None
    try:
        return share(dist.PrefixStore("shared", store))
    except SharedMemoryUnavailable as error:
        if rank == 0:
            warnings.warn(f"no shared memory between these ranks, gloo is used instead: {error}", stacklevel=4)
        return None
