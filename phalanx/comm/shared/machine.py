"""Whether ranks are on one machine, and can therefore share memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.comm.shared import futex

if TYPE_CHECKING:
    from phalanx.comm.shared.telling import Tell


def machine_id() -> str:
    """Return what is equal on ranks that may share memory: the machine since it booted, and its view of processes.

    Ranks in different containers see different processes, and could not open each other's memory. Ranks in different
    network namespaces stand for different machines, here and in tests: what goes between them goes over the network.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else "?"]
    parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net") if Path(f"/proc/self/ns/{kind}").exists()]
    return "/".join(parts)


def on_one_machine(tell: Tell, rank: int) -> bool:
    """Whether all ranks are on this machine, and it has what shared memory needs; equal on all ranks."""
    return len(set(tell(machine_id() if futex.is_available() else f"rank {rank} has no futex"))) == 1
