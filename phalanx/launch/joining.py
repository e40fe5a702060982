"""Let the launcher see who waits in init_process_group, so that a rank that never comes can be named."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket


def announce_joining(events: socket.socket, rank: int) -> None:
    """Wrap torch.distributed.init_process_group: it behaves the same, and says when it is entered and left."""
    import torch.distributed
    from torch.distributed import device_mesh, distributed_c10d

    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        _say(events, "joining", rank)
        original(*args, **kwargs)
        _say(events, "joined", rank)

    # device_mesh took its own reference when it was imported.
    for module in (torch.distributed, distributed_c10d, device_mesh):
        setattr(module, original.__name__, init_process_group)


def _say(events: socket.socket, what: str, rank: int) -> None:
    try:
        events.send(json.dumps({"event": what, "rank": rank}).encode())
    except (BrokenPipeError, ConnectionResetError):
        # The supervisor is gone; this rank is about to be killed.
        return
