"""Shared memory where it can be had: all ranks on one machine, and room for it in /dev/shm; else a word about it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from phalanx.comm.shared.exchange import SharedExchange
from phalanx.comm.shared.group import SharedGroup
from phalanx.comm.shared.machine import on_one_machine
from phalanx.errors import SharedMemoryUnavailable

if TYPE_CHECKING:
    from phalanx.comm.shared.telling import Tell


def share_memory(tell: Tell, rank: int, size: int, *, timeout: float, room: int = 0) -> SharedGroup | None:
    """Return the shared memory of ranks that are all on this machine, else None; all of them call this.

    `room`: bytes that the caller will ask of it for tensors. Where there is too little, one warning says how much.
    """
    if not on_one_machine(tell, rank):
        return None
    try:
        return SharedGroup(tell, rank, size, timeout=timeout, room=room)
    except SharedMemoryUnavailable as error:
        if rank == 0:
            warnings.warn(f"no shared memory between these ranks, gloo is used instead: {error}", stacklevel=3)
        return None


def share_gradients(
    tell: Tell, rank: int, size: int, nbytes: int, *, timeout: float
) -> tuple[SharedExchange, torch.Tensor] | None:
    """Return an exchange of the ranks of this machine, and so many bytes that lie in the memory they share, or None."""
    group = share_memory(tell, rank, size, timeout=timeout, room=nbytes)
    return None if group is None else (SharedExchange(group), group.empty(nbytes, torch.uint8))
