"""diloco: local-sgd whose rounds end with a step of an outer optimizer, SGD with Nesterov momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from phalanx.strategies.local_sgd import LocalSGD, Round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

OUTER = "outer"
"""Under this name a checkpoint holds the outer optimizer's momentum."""


class DiLoCo(LocalSGD):
    """Whole copies; the average movement of a round is the gradient of an outer step."""

    name = "diloco"
    optional_state = (OUTER,)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's weights, and keep a copy."""
        before = len(self._rounds)
        wrapped = super().wrap(model)
        for number in range(before, len(self._rounds)):
            made = self._rounds[number]
            self._rounds[number] = OuterRound(
                made, rate=self.config.outer_learning_rate, momentum=self.config.outer_momentum
            )
        return wrapped

    def state(self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return what `ddp` returns, and the outer momentum."""
        return {**super().state(wrapped, optimizers), **self._momentum_of(wrapped)}

    def load_state(
        self, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]
    ) -> None:
        """Put back what `state` returned; the outer momentum was filled where it lies."""
        super().load_state(wrapped, optimizers, state)
        for each in self._rounds:
            if isinstance(each, OuterRound):
                each.remember()

    def _momentum_of(self, wrapped: nn.Module) -> dict[str, Any]:
        own = {id(parameter) for parameter in wrapped.parameters()}
        for each in self._rounds:
            if isinstance(each, OuterRound) and any(id(p) in own for p in each.parameters.values()):
                return {OUTER: each.momentum_by_name()}
        return {}


class OuterRound(Round):
    """The parameters of one model, the point they started a round from, and the momentum of the outer steps."""

    def __init__(self, made: Round, *, rate: float, momentum: float) -> None:
        self.__dict__.update(made.__dict__)
        self._start = [parameter.detach().clone() for parameter in self.parameters.values()]
        self._momentum = [torch.zeros_like(start) for start in self._start]
        self._rate, self._decay = rate, momentum

    def remember(self) -> None:
        """Begin a round at the current parameters."""
        torch._foreach_copy_(self._start, [parameter.detach() for parameter in self.parameters.values()])

    def momentum_by_name(self) -> dict[str, torch.Tensor]:
        """Return the momentum's own memory, under the parameters' names."""
        return dict(zip(self.parameters, self._momentum, strict=True))

    @torch.no_grad()
    def average(self) -> None:
        """Take an outer step along the average movement of the ranks."""
        super().average()
        parameters = [parameter.detach() for parameter in self.parameters.values()]
        movement = torch._foreach_sub(self._start, parameters)  # a gradient points backwards
        torch._foreach_mul_(self._momentum, self._decay)
        torch._foreach_add_(self._momentum, movement)
        ahead = torch._foreach_add(movement, self._momentum, alpha=self._decay)  # Nesterov's look-ahead
        torch._foreach_add_(self._start, ahead, alpha=-self._rate)
        torch._foreach_copy_(parameters, self._start)
