"""Registers the backend "phalanx" with torch.distributed, at no cost until it is used.

The launcher calls `register` in its ranks, so that `init_process_group("phalanx")` works there in a script that does
not import Phalanx. There is no entry point for torch ("torch.backends"): where it cannot load one, its import fails.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = "phalanx"


def register() -> None:
    """Register the backend, unless it is registered already."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    from phalanx.comm.backend import PhalanxGroup

    return PhalanxGroup(store, rank, size, timeout)
