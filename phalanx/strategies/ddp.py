"""ddp: every rank holds the whole model, and torch averages gradients during backward."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import torch_compat
from phalanx.comm.compress.hook import CompressionHook, FixedBuckets
from phalanx.comm.exchange import is_emulated, open_exchange
from phalanx.config import DistributedConfig
from phalanx.strategies.base import CommStats
from phalanx.strategies.compressing import CompressesGradients, Lane
from phalanx.strategies.tensors import is_meta, materialise
from phalanx.world.world import World


class DDP(CompressesGradients):
    """torch.nn.parallel.DistributedDataParallel; with one rank, the bare model."""

    name = "ddp"

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config, world)
        # Not held: torch can deadlock where a group is destroyed while its DDP lives.
        self._plain: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._steps = self._counted = 0
        self._times = (0.0, 0.0)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in torch's DDP. One rank, or nothing to train, needs no wrapper."""
        if is_meta(model):
            materialise(model, self.world.device)
        if self.world.world_size == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        device = self.world.device
        options: dict[str, Any] = {
            "device_ids": [device.index] if device.type == "cuda" else None,
            "bucket_cap_mb": self.config.bucket_cap_mb,
            "find_unused_parameters": self.config.find_unused_parameters,
            "gradient_as_bucket_view": True,  # gradients are in the buckets: nothing is copied
            "init_sync": self.world.env.generation == 0,  # after that rank 0 may be a new rank, without the state
        }
        if self.config.compression == "none" and not is_emulated():
            plain = DistributedDataParallel(model, **options)
            self._plain.add(plain)
            return plain
        compressor = self.compressor_for(model)
        wrapped = FixedBuckets(model, **options)
        exchange = open_exchange(dist.new_group(timeout=timedelta(seconds=self.config.timeout)))
        hook = CompressionHook(compressor, exchange, model.named_parameters(), self.world.device)
        wrapped.register_comm_hook(None, hook.take)
        self.lanes.append(Lane(compressor, exchange, hook.comm_thread))
        return wrapped

    def after_step(self) -> None:
        """Count a step."""
        self._steps += 1

    def comm_stats(self) -> CommStats | None:
        """Return the times of plain DDP: the mean of those that torch takes (ten steps, then every hundredth)."""
        times = [found for model in self._plain if (found := torch_compat.ddp_times(model)) is not None]
        if not times:
            return super().comm_stats()
        busy, waited = (sum(each) * (self._steps - self._counted) for each in zip(*times, strict=True))
        self._times = (self._times[0] + busy, self._times[1] + waited)
        self._counted = self._steps
        return CommStats(None, None, *self._times)

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the module inside DDP."""
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Do what `no_sync` does: the reducer reads this flag in forward."""
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.require_backward_grad_sync = sync
