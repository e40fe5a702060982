"""auto: the fastest form of ddp for these ranks, used when no strategy is named.

CPU ranks of one machine average gradients in shared memory (`ring_ddp`), which is much faster and gives the same bits
with two ranks. All others, and models with buffers or sparse gradients, use torch's DistributedDataParallel.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.comm.exchange import Exchange, is_emulated
from phalanx.comm.reducer import bytes_for
from phalanx.comm.shm import share_gradients
from phalanx.comm.shm.pages import group_text_gatherer
from phalanx.config import DistributedConfig
from phalanx.strategies.ddp import DDP
from phalanx.strategies.ring_ddp import RingDDP
from phalanx.world.world import World


class Auto(RingDDP):
    """Shared memory where it is possible, else torch's DDP; decided per model."""

    name = "ddp"

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config, world)
        self._ddp = DDP(config, world)
        self._shared: tuple[Exchange, torch.Tensor] | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Use shared memory for the model's gradients where possible; equal on all ranks."""
        self._shared = self._share(model)
        return self._ddp.wrap(model) if self._shared is None else super().wrap(model)

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the user's own model."""
        return self._ddp.unwrap(wrapped)

    def follow(self, wrapped: nn.Module) -> None:
        """Average the gradients of unfrozen parameters too; a model that was wholly frozen joins here."""
        if isinstance(wrapped, DistributedDataParallel):
            self._ddp.follow(wrapped)
        else:
            super().follow(wrapped)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; gradients of models in torch's DDP are averaged there."""
        self._ddp.backward(loss)

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Set whether the next backward pass ends with averaged gradients."""
        if isinstance(wrapped, DistributedDataParallel):
            self._ddp.set_sync(wrapped, sync)
        else:
            super().set_sync(wrapped, sync)

    def _share(self, model: nn.Module) -> tuple[Exchange, torch.Tensor] | None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        chosen = self.config.communication_backend not in (None, "phalanx")
        world = self.world
        on_cpus = world.device.type == "cpu" and world.env.on_one_machine
        if not trained or chosen or not on_cpus or world.world_size == 1 or is_emulated():
            return None
        # DDP broadcasts rank 0's buffers before each forward pass, which may read them.
        if any(True for _ in model.buffers()) or any(
            getattr(module, "sparse", False) is True for module in model.modules()
        ):
            return None
        gather_text, nbytes = group_text_gatherer(None), bytes_for(trained)
        return share_gradients(gather_text, world.rank, world.world_size, nbytes, timeout=self.config.timeout)

    def _open_exchange(self, nbytes: int) -> tuple[Exchange, torch.Tensor]:
        shared, self._shared = self._shared, None  # wrap() has opened it; parameters that are unfrozen need another
        return super()._open_exchange(nbytes) if shared is None else shared
