"""Strategies `local-sgd` and `diloco`: ranks step alone and average their weights every few steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from phalanx import torch_compat
from phalanx.comm.compress import ring_bytes
from phalanx.comm.exchange import Exchange
from phalanx.config import DistributedConfig
from phalanx.strategies.base import CommStats, Strategy, newly_trained, share_weights
from phalanx.strategies.optimizer_state import level_moments
from phalanx.strategies.ring_ddp import open_exchange_for
from phalanx.strategies.tensors import is_meta, materialise
from phalanx.world.abort import complete
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
        self.follow(model)
        return model

    def follow(self, wrapped: nn.Module) -> None:
        """Average parameters that are unfrozen now, too; those that are frozen stay, since they may differ still."""
        ids = {id(parameter) for outer in self._rounds for parameter in outer.parameters.values()}
        trained = newly_trained(wrapped, ids)
        if self.world.world_size > 1 and trained:
            if not any(id(parameter) in ids for parameter in wrapped.parameters()):
                share_weights(wrapped)
            nbytes = sum(parameter.nbytes for _, parameter in trained)
            exchange, memory = open_exchange_for(self.config, self.world, nbytes)
            self._rounds.append(self._round(Round(dict(trained), exchange, memory)))

    def _round(self, outer: Round) -> Round:
        return outer

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
        for outer in self._rounds:
            outer.average()
        self._alone = 0

    def consolidate(self, wrapped: nn.Module) -> None:
        """End the round, so that all ranks hold one model."""
        super().consolidate(wrapped)
        if self._alone:
            self._average()

    def state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return what `ddp` returns; moments are averaged first, since a checkpoint holds them once."""
        for outer in self._rounds:
            outer.average_moments(optimizers)
        return self.own_state(wrapped, optimizers)

    def own_state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return what this rank has trained."""
        return Strategy.state(self, wrapped, optimizers)

    def comm_stats(self) -> CommStats | None:
        """Return what was sent, and what averaging every step's gradients would have sent."""
        if not self._rounds:
            return None
        return CommStats(
            sent_bytes=sum(outer.exchange.sent_bytes for outer in self._rounds),
            plain_bytes=self._steps * sum(ring_bytes(outer.nbytes, outer.exchange.size) for outer in self._rounds),
            busy_s=sum(outer.seconds for outer in self._rounds),
            waited_s=sum(outer.seconds for outer in self._rounds),
        )

    def return_weights(self, wrapped: nn.Module) -> None:
        """Average what the ranks have trained since the last round."""
        self.consolidate(wrapped)

    def close(self) -> None:
        """Release the buffers that weights are sent in."""
        for outer in self._rounds:
            outer.exchange.close()
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
            if tensor.nbytes > self.nbytes:  # for example an fp32 master copy of the only bf16 parameter
                message = tensor.to(self._memory.device).contiguous()
                self.exchange.all_reduce(message, "mean")
                complete()
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
        torch_compat.foreach_copy_(views, tensors)
        self.exchange.all_reduce(flat, "mean")
        complete()
        torch_compat.foreach_copy_(tensors, views)


OUTER = "outer"
"""The key of the outer optimizer's momentum in a checkpoint."""


class DiLoCo(LocalSGD):
    """Whole copies; the average movement of a round is the gradient of an outer step."""

    name = "diloco"
    optional_state = (OUTER,)

    def _round(self, outer: Round) -> Round:
        """Keep a copy of the parameters, where the round begins."""
        return OuterRound(outer, rate=self.config.outer_learning_rate, momentum=self.config.outer_momentum)

    def own_state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return what this rank has trained, and the outer momentum."""
        state = super().own_state(wrapped, optimizers)
        ids = {id(parameter) for parameter in wrapped.parameters()}
        momentum: dict[str, torch.Tensor] = {}
        for outer in self._rounds:
            if isinstance(outer, OuterRound) and any(id(p) in ids for p in outer.parameters.values()):
                momentum |= outer.momentum_by_name()
        return {**state, OUTER: momentum} if momentum else state

    def load_state(
        self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]
    ) -> None:
        """Load what `state` returned, the outer momentum too, and start a round."""
        super().load_state(wrapped, optimizers, state)
        for outer in self._rounds:
            if isinstance(outer, OuterRound):
                outer.load_momentum(state.get(OUTER, {}))
                outer.restart()


class OuterRound(Round):
    """The parameters of one model, the point they started a round from, and the momentum of the outer steps."""

    def __init__(self, outer: Round, *, rate: float, momentum: float) -> None:
        self.__dict__.update(outer.__dict__)
        self._start = [parameter.detach().clone() for parameter in self.parameters.values()]
        self._momentum = [torch.zeros_like(start) for start in self._start]
        self._rate, self._decay = rate, momentum

    def restart(self) -> None:
        """Start a round at the current parameters."""
        torch_compat.foreach_copy_(self._start, [parameter.detach() for parameter in self.parameters.values()])

    def load_momentum(self, saved: dict[str, torch.Tensor]) -> None:
        """Load the momentum by parameter name."""
        for name, momentum in self.momentum_by_name().items():
            if name in saved:
                momentum.copy_(saved[name])

    def momentum_by_name(self) -> dict[str, torch.Tensor]:
        """Return the momentum, not copied, by parameter name."""
        return dict(zip(self.parameters, self._momentum, strict=True))

    @torch.no_grad()
    def average(self) -> None:
        """Take an outer step along the average movement of the ranks."""
        super().average()
        parameters = [parameter.detach() for parameter in self.parameters.values()]
        movement = torch_compat.foreach_sub(self._start, parameters)  # a gradient points backwards
        torch_compat.foreach_mul_(self._momentum, self._decay)
        torch_compat.foreach_add_(self._momentum, movement)
        ahead = torch_compat.foreach_add(movement, self._momentum, alpha=self._decay)  # Nesterov's look-ahead
        torch_compat.foreach_add_(self._start, ahead, alpha=-self._rate)
        torch_compat.foreach_copy_(parameters, self._start)
