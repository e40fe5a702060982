"""ddp: every rank holds the whole model, gradients are averaged while backward goes on (torch's own reducer)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from phalanx.strategies.base import Strategy
from phalanx.strategies.materialise import is_meta, materialise

if TYPE_CHECKING:
    from torch import nn


class DDP(Strategy):
    """torch.nn.parallel.DistributedDataParallel; with one rank, the bare model."""

    name = "ddp"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in torch's DDP. One rank, or nothing to train, needs no wrapper."""
        if is_meta(model):
            materialise(model, self.world.device)
        if self.world.world_size == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        device = self.world.device
        return DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=self.config.bucket_cap_mb,
            find_unused_parameters=self.config.find_unused_parameters,
            gradient_as_bucket_view=True,  # gradients live in the buckets: no copy in, no copy out
        )

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the module inside DDP."""
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Do what `no_sync` does, as one assignment: the reducer reads the flag in forward."""
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.require_backward_grad_sync = sync
