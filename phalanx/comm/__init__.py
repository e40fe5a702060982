"""How bytes move between ranks: collectives written out, shared memory, buckets, compression.

`register_backend` makes the backend "phalanx" known to torch.distributed, at no cost until it is used. A launcher calls
it in its ranks, so that `init_process_group("phalanx")` works there in a script that does not import Phalanx. There is
no entry point for torch ("torch.backends"): where it cannot load one, its import fails.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

BACKEND = "phalanx"


def register_backend() -> None:
    """Register the backend, unless it is registered already."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    from phalanx.comm.backend import PhalanxGroup

    return PhalanxGroup(store, rank, size, timeout)
