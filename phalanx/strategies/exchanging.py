"""How ranks that hold whole copies reach each other, chosen once: shared memory, our own collectives, or torch's."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx.comm.shared.opening import share_gradients
from phalanx.comm.shared.telling import tell_through
from phalanx.comm.throttle import is_emulated, open_exchange
from phalanx.comm.wire_exchange import WireExchange

if TYPE_CHECKING:
    from phalanx.comm.exchange import Exchange
    from phalanx.config import DistributedConfig
    from phalanx.world.world import World


def open_exchange_for(config: DistributedConfig, world: World, nbytes: int) -> tuple[Exchange, torch.Tensor]:
    """Return how tensors travel, and so many bytes for them to lie in meanwhile; all ranks call this, in one order."""
    ours = world.device.type == "cpu" and not is_emulated()
    if ours:
        shared = share_gradients(tell_through(None), world.rank, world.world_size, nbytes, timeout=config.timeout)
        if shared is not None:
            return shared
    # A group of its own: the courier's collectives must not meet those of the main thread.
    group = dist.new_group(timeout=timedelta(seconds=config.timeout))
    memory = torch.empty(nbytes, dtype=torch.uint8, device=world.device)
    if ours or config.fixed_order:
        return WireExchange(group, in_fixed_order=config.fixed_order), memory
    return open_exchange(group), memory
