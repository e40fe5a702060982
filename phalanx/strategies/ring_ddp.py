"""ring: ddp with the collectives of Phalanx. Every rank holds the whole model; gradients are averaged during backward.

Ranks of one node average gradients in place, in shared memory; between nodes by a ring. The weights are those of
torch's DDP, with equal bits where additions have the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.comm.exchange import Exchange, TorchExchange
from phalanx.comm.reducer import GradientReducer, bytes_for
from phalanx.comm.shm import share_gradients
from phalanx.comm.shm.pages import group_text_gatherer
from phalanx.config import DistributedConfig
from phalanx.strategies.base import newly_trained, share_weights
from phalanx.strategies.ddp import DDP, CompressesGradients, Lane
from phalanx.strategies.tensors import is_meta, materialise
from phalanx.world.world import World


class RingDDP(CompressesGradients):
    """A `GradientReducer` on the model's parameters; the model itself is not wrapped."""

    name = "ring"

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config, world)
        self._reducers: dict[int, list[GradientReducer]] = {}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's weights, and average gradients from now on."""
        if is_meta(model):
            materialise(model, self.world.device)
        self._reduce(model)
        return model

    def follow(self, wrapped: nn.Module) -> None:
        """Leave frozen parameters out, and average the gradients of unfrozen ones too."""
        for reducer in self._reducers.get(id(wrapped), ()):
            reducer.follow()
        self._reduce(wrapped)

    def _reduce(self, model: nn.Module) -> None:
        """Average the gradients of the model's parameters that no reducer has yet."""
        reducers = self._reducers.setdefault(id(model), [])
        named = newly_trained(model, {id(parameter) for reducer in reducers for parameter in reducer.parameters})
        alone = self.world.world_size == 1
        if not named or (alone and not self.config.fixed_order):
            return
        if not alone and not reducers:
            share_weights(model)
        exchange, memory = self._open_exchange(bytes_for(parameter for _, parameter in named))
        settings: dict[str, Any] = {
            "compressor": self.compressor_for(model),
            "cap_bytes": self.config.bucket_cap_mb * 2**20,
            "memory": memory,
            "allow_unused": self.config.find_unused_parameters,
        }
        kind: type[GradientReducer] = GradientReducer
        if self.config.fixed_order:
            from phalanx.comm.fixed_order_reducer import FixedOrderReducer as kind  # few runs fix the order

            settings["micro_batches"] = self.world.accumulation(self.config.gradient_accumulation_steps)
        reducer = kind(named, exchange, **settings)
        reducer.sync = all(other.sync for other in reducers)
        reducers.append(reducer)
        self.lanes.append(Lane(settings["compressor"], exchange, reducer.comm_thread))

    @property
    def adds_passes(self) -> bool:  # type: ignore[override]
        """Whether a step is not a fixed tree of micro-batches, in which each has its place."""
        return not self.config.fixed_order or self.world.accumulation(self.config.gradient_accumulation_steps) == 1

    def step(self, optimizer_step: Callable[[], object] | None) -> None:
        """Take the step, or drop what a fixed order has added up."""
        super().step(optimizer_step)
        for reducers in () if optimizer_step is not None else self._reducers.values():
            for reducer in reducers:
                reducer.drop()

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Set whether the next backward pass ends with averaged gradients."""
        for reducer in self._reducers.get(id(wrapped), ()):
            reducer.sync = sync

    def close(self) -> None:
        """Remove the hooks from the models and release everything else."""
        for reducers in self._reducers.values():
            for reducer in reducers:
                reducer.close()
        self._reducers.clear()
        super().close()

    def _open_exchange(self, nbytes: int) -> tuple[Exchange, torch.Tensor]:
        if self.world.world_size > 1:
            return open_exchange_for(self.config, self.world, nbytes)
        # One rank in a fixed order: nothing is sent, but micro-batches are added up as on many ranks.
        return Exchange(), torch.empty(nbytes, dtype=torch.uint8, device=self.world.device)


def open_exchange_for(config: DistributedConfig, world: World, nbytes: int) -> tuple[Exchange, torch.Tensor]:
    """Return how tensors are sent, and a buffer of `nbytes` for them; all ranks call this, in the same order."""
    on_cpu = world.device.type == "cpu"
    if on_cpu:
        shared = share_gradients(
            group_text_gatherer(None), world.rank, world.world_size, nbytes, timeout=config.timeout
        )
        if shared is not None:
            return shared
    # A separate group: collectives of the communication thread must not interleave with those of the main thread.
    group = dist.new_group(timeout=timedelta(seconds=config.timeout))
    memory = torch.empty(nbytes, dtype=torch.uint8, device=world.device)
    if on_cpu or config.fixed_order:
        from phalanx.comm.collectives.hierarchical import ChannelExchange  # few runs have several nodes

        return ChannelExchange(group, in_fixed_order=config.fixed_order), memory
    return TorchExchange(group), memory


class Auto(RingDDP):
    """The fastest form of ddp for these ranks, used when no strategy is named; decided per model.

    CPU ranks of one node average gradients in shared memory, which is much faster and gives the same bits with two
    ranks. All others, and models with buffers or sparse gradients, use torch's DistributedDataParallel.
    """

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

    @property
    def why_not_captured(self) -> str:
        """Why a step cannot be recorded: on GPUs as torch's DDP."""
        return self._ddp.why_not_captured

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; gradients of models in torch's DDP are averaged there."""
        self._ddp.backward(loss)

    def set_sync(self, wrapped: nn.Module, sync: bool) -> None:
        """Set whether the next backward pass ends with averaged gradients."""
        if isinstance(wrapped, DistributedDataParallel):
            self._ddp.set_sync(wrapped, sync)
        else:
            super().set_sync(wrapped, sync)

    def close(self) -> None:
        """Release what either form holds."""
        self._ddp.close()
        super().close()

    def _share(self, model: nn.Module) -> tuple[Exchange, torch.Tensor] | None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        chosen = self.config.communication_backend not in (None, "phalanx")
        world = self.world
        on_cpus = world.device.type == "cpu" and world.env.on_one_node
        if not trained or chosen or not on_cpus or world.world_size == 1:
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
