"""ring: what ddp does, by our own hands: every rank holds the whole model, gradients travel while backward goes on.

Ranks of one machine add up their gradients where these lie, in memory that all of them see; between machines they
travel around a ring. Same weights as torch's DDP, to the last bit where additions come in the same order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx.comm.link import is_emulated, open_exchange
from phalanx.comm.reducer import GradientReducer, bytes_for
from phalanx.comm.shared.opening import share_gradients
from phalanx.strategies.base import Strategy, share_weights
from phalanx.strategies.compressing import CompressesGradients, Lane
from phalanx.strategies.materialise import is_meta, materialise

if TYPE_CHECKING:
    from torch import nn

    from phalanx.comm.exchange import Exchange
    from phalanx.config import DistributedConfig
    from phalanx.world.world import World


class RingDDP(CompressesGradients, Strategy):
    """A reducer of ours on the model's parameters; the model itself stays as it is."""

    name = "ring"

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config, world)
        self._reducers: dict[int, GradientReducer] = {}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Start from rank 0's weights, and have gradients averaged from now on."""
        if is_meta(model):
            materialise(model, self.world.device)
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if self.world.world_size == 1 or not named:
            return model
        share_weights(model)
        compressor = self.compressor_for(model)
        exchange, memory = self._open_exchange(bytes_for(parameter for _, parameter in named))
        reducer = self._reducers[id(model)] = GradientReducer(
            named,
            exchange,
            compressor,
            cap_bytes=self.config.bucket_cap_mb * 2**20,
            memory=memory,
            allow_unused=self.config.find_unused_parameters,
        )
        self.lanes.append(Lane(compressor, exchange, reducer.courier))
        return model

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Say whether the next backward pass ends with averaged gradients."""
        reducer = self._reducers.get(id(wrapped))
        if reducer is not None:
            reducer.sync = sync

    def close_lanes(self) -> None:
        """Take the hooks off the models, and end the couriers."""
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()
        super().close_lanes()

    def _open_exchange(self, nbytes: int) -> tuple[Exchange, torch.Tensor]:
        """Return how gradients travel, and the memory that they lie in meanwhile."""
        world = self.world
        if world.device.type == "cpu" and not is_emulated():
            assert world.store is not None, "several ranks have met"
            store = dist.PrefixStore(f"ring/{len(self._reducers)}", world.store)
            shared = share_gradients(store, world.rank, world.world_size, nbytes, timeout=self.config.timeout)
            if shared is not None:
                return shared
        # A group of its own: the courier's collectives must not meet those of the main thread.
        group = dist.new_group(timeout=timedelta(seconds=self.config.timeout))
        return open_exchange(group), torch.empty(nbytes, dtype=torch.uint8, device=world.device)
