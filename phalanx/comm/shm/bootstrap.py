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
    """Return an all-gather of texts, made of an all-gather of tensors into a list."""

    def gather_text(text: str) -> list[str]:
        own = torch.tensor(list(text.encode()[:TEXT].ljust(TEXT)), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(size)]
        try:
            all_gather(gathered, own)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise CommunicationError(f"a rank was lost before the ranks could share memory: {reason}") from error
        return [bytes(row.tolist()).decode(errors="replace").rstrip() for row in gathered]

    return gather_text


def group_text_gatherer(group: dist.ProcessGroup | None) -> AllGatherText:
    """Return an all-gather of texts in a process group that supports CPU tensors."""
    return text_gatherer(lambda gathered, own: dist.all_gather(gathered, own, group=group), dist.get_world_size(group))


def machine_id() -> str:
    """Return what is equal on ranks that may share memory: host name, boot id, and the pid and network namespaces.

    Ranks in different containers cannot open each other's memory. Tests use network namespaces as machines.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else "?"]
    parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net") if Path(f"/proc/self/ns/{kind}").exists()]
    return "/".join(parts)


def on_one_machine(gather_text: AllGatherText, rank: int) -> bool:
    """Whether all ranks are on this machine and it supports shared memory; equal on all ranks."""
    return len(set(gather_text(machine_id() if futex.is_available() else f"rank {rank} has no futex"))) == 1
