"""Let the launcher see who waits in init_process_group, so that a rank that never comes can be named."""

from __future__ import annotations

import functools
import json
import os
import socket
from typing import Any


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


def announce(what: str, rank: int) -> None:
    """Say "joining" or "joined" for ranks that meet by other means than torch's."""
    descriptor = os.environ.get("PHALANX_EVENTS_FD", "")
    if descriptor.isdecimal():
        with socket.socket(fileno=os.dup(int(descriptor))) as events:
            _say(events, what, rank)


def _say(events: socket.socket, what: str, rank: int) -> None:
    try:
        events.send(json.dumps({"event": what, "rank": rank}).encode())
    except (BrokenPipeError, ConnectionResetError):
        # The supervisor is gone; this rank is about to be killed.
        return
