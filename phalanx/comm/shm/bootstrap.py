"""Before shared memory exists: an all-gather of short texts, and the check that all ranks are on one machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.comm.shm import futex
from phalanx.errors import CommunicationError

AllGatherText = Callable[[str], list[str]]
"""Sends a short text to all ranks and returns the texts of all of them, by rank."""

TEXT = 256
"""Bytes of such a text."""


def text_gatherer(all_gather: Callable[[list[torch.Tensor], torch.Tensor], object], size: int) -> AllGatherText:
    """Return a way to tell, made of a collective that collects the ranks' tensors in a list."""

    def tell(text: str) -> list[str]:
        own = torch.tensor(list(text.encode()[:TEXT].ljust(TEXT)), dtype=torch.uint8)
        heard = [torch.empty_like(own) for _ in range(size)]
        try:
            all_gather(heard, own)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise CommunicationError(f"a rank was lost before the ranks could share memory: {reason}") from error
        return [bytes(row.tolist()).decode(errors="replace").rstrip() for row in heard]

    return tell


def group_text_gatherer(group: dist.ProcessGroup | None) -> AllGatherText:
    """Return the way to tell of a process group that carries CPU tensors."""
    return text_gatherer(lambda heard, own: dist.all_gather(heard, own, group=group), dist.get_world_size(group))


def machine_id() -> str:
    """Return what is equal on ranks that may share memory: the machine since it booted, and its view of processes.

    Ranks in different containers see different processes, and could not open each other's memory. Ranks in different
    network namespaces stand for different machines, here and in tests: what goes between them goes over the network.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else "?"]
    parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net") if Path(f"/proc/self/ns/{kind}").exists()]
    return "/".join(parts)


def on_one_machine(tell: AllGatherText, rank: int) -> bool:
    """Whether all ranks are on this machine, and it has what shared memory needs; equal on all ranks."""
    return len(set(tell(machine_id() if futex.is_available() else f"rank {rank} has no futex"))) == 1
