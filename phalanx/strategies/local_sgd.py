"""local-sgd and diloco: every rank takes `sync_every` local steps (a round), then weights are averaged.

local-sgd uses the average. diloco uses the distance that the average has moved in the round as a gradient for an outer
optimizer (SGD with Nesterov momentum). Ranks communicate once per round: for links that are too slow even for
compressed gradients at every step.

Evaluation and checkpoints need one model: they end the round early. Optimizers' moments are then averaged too, so that
a resumed run continues as this one does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.compress.base import ring_bytes
from phalanx.strategies.base import CommStats, Strategy, share_weights
from phalanx.strategies.materialise import is_meta, materialise
from phalanx.strategies.moments import level_moments
from phalanx.strategies.ring_ddp import open_exchange_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from phalanx.comm.exchange import Exchange
    from phalanx.config import DistributedConfig
    from phalanx.world.world import World


class LocalSGD(Strategy):
    """Whole copies that are averaged every `sync_every` steps."""

    name = "local-sgd"
    in_lockstep = False
    local_steps = True

    def __init__(self, config: DistributedConfig, world: World) -> None:
        super().__init__(config, world)
        self._rounds: list[Round] = []
        self._alone = 0
        self._steps = 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's weights; within a round each rank then trains its own copy."""
        if is_meta(model):
            materialise(model, self.world.device)
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if self.world.world_size > 1 and trained:
            share_weights(model)
            nbytes = sum(parameter.nbytes for _, parameter in trained)
            exchange, memory = open_exchange_for(self.config, self.world, nbytes)
            self._rounds.append(Round(dict(trained), exchange, memory))
        return model

    def after_step(self) -> None:
        """Average the weights when the round is over."""
        self._alone += 1
        self._steps += 1
        if self._alone == self.config.sync_every:
            self._average()

    @property
    def just_synced(self) -> bool:  # type: ignore[override]
        """Whether the step just taken has ended a round."""
        return self._alone == 0

    def _average(self) -> None:
        for each in self._rounds:
            each.average()
        self._alone = 0

    def consolidate(self, wrapped: nn.Module) -> None:
        """End the round, so that all ranks hold one model."""
        super().consolidate(wrapped)
        if self._alone:
            self._average()

    def state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return what `ddp` returns; moments are averaged first, since a checkpoint holds them once."""
        for each in self._rounds:
            each.average_moments(optimizers)
        return super().state(wrapped, optimizers)

    def comm_stats(self) -> CommStats | None:
        """Return what was sent, and what averaging every step's gradients would have sent."""
        if not self._rounds:
            return None
        return CommStats(
            sent_bytes=sum(each.exchange.sent_bytes for each in self._rounds),
            plain_bytes=self._steps * sum(ring_bytes(each.nbytes, each.exchange.size) for each in self._rounds),
            busy_s=sum(each.seconds for each in self._rounds),
            waited_s=sum(each.seconds for each in self._rounds),
        )

    def return_weights(self, wrapped: nn.Module) -> None:
        """Average what the ranks have trained since the last round."""
        self.consolidate(wrapped)

    def close(self) -> None:
        """Release the buffers that weights are sent in."""
        for each in self._rounds:
            each.exchange.close()
        self._rounds.clear()


class Round:
    """The parameters of one model, which differ between ranks until they are averaged."""

    def __init__(self, parameters: dict[str, nn.Parameter], exchange: Exchange, memory: torch.Tensor) -> None:
        self.parameters = parameters
        self.exchange = exchange
        self.nbytes = memory.nbytes
        self.seconds = 0.0
        self._memory = memory

    @torch.no_grad()
    def average(self) -> None:
        """Leave the average over the ranks in every rank's parameters."""
        self._average(self.parameters.values())

    @torch.no_grad()
    def average_moments(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Average what the optimizers keep of each of these parameters, over the ranks that keep it."""
        for optimizer in optimizers:
            moments = level_moments(self.parameters, optimizer)
            self._average(moment.tensor for moment in moments)
            for moment in moments:
                if moment.holders < self.exchange.size:  # zeros of the others do not count
                    moment.tensor.mul_(self.exchange.size / moment.holders)

    def _average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors in few large messages: as many at a time as fit into the shared buffer."""
        begin = time.perf_counter()
        batch: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.nbytes > self.nbytes:  # such as an fp32 master copy of the only bf16 parameter
                message = tensor.to(self._memory.device).contiguous()
                self.exchange.all_reduce(message, "mean")
                tensor.copy_(message)
                continue
            if batch and (tensor.dtype != batch[0].dtype or sum(t.nbytes for t in batch) + tensor.nbytes > self.nbytes):
                self._average_batch(batch)
                batch = []
            batch.append(tensor)
        if batch:
            self._average_batch(batch)
        self.seconds += time.perf_counter() - begin

    def _average_batch(self, tensors: list[torch.Tensor]) -> None:
        flat = self._memory[: sum(tensor.nbytes for tensor in tensors)].view(tensors[0].dtype)
        parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors])
        views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(views, tensors)
        self.exchange.all_reduce(flat, "mean")
        torch._foreach_copy_(tensors, views)
