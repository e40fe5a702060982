"""Let the launcher see who waits in init_process_group, so that a rank that never comes can be named."""

from __future__ import annotations

import functools
from typing import Any

from phalanx.observe.sinks import announce


def announce_joining(rank: int) -> None:
    """Wrap torch.distributed.init_process_group so that the launcher hears when it is entered and left."""
    import torch.distributed
    from torch.distributed import device_mesh, distributed_c10d

    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        announce("joining", rank)
        original(*args, **kwargs)
        announce("joined", rank)

    # device_mesh took its own reference when it was imported.
    for module in (torch.distributed, distributed_c10d, device_mesh):
        setattr(module, original.__name__, init_process_group)
