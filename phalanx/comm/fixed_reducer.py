"""Gradients whose sum has the same bits at 1, 2, 4 and 8 ranks: the reducer in the order of `fixed_order`.

Every micro-batch's gradients are taken out when its backward pass ends, added up by the tree, and averaged over the
ranks by the same tree. Nothing travels before the last micro-batch is there: this is for proofs and for ranks that
come and go, not for speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.fixed_order import TreeAccumulator, check_ranks
from phalanx.comm.reducer import GradientReducer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.comm.exchange import Exchange


class FixedOrderReducer(GradientReducer):
    """Averages gradients at the end of a step of `micro_batches` backward passes, always in one order."""

    _takes_every_pass = True

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        exchange: Exchange,
        *,
        micro_batches: int,
        **settings: Any,
    ) -> None:
        check_ranks(exchange.size)
        self._accumulator = TreeAccumulator(micro_batches)
        super().__init__(named_parameters, exchange, **settings)
        self._arrivals = None
        self._used = [False] * len(self._parameters)

    def _forget_pass(self) -> bool:
        for parameter in self._parameters:  # what that pass left belongs to nobody
            parameter.grad = None
        return super()._forget_pass()

    def _take(self, number: int) -> None:
        self._here[number] = True

    def _finish_pass(self) -> None:
        if not self._allow_unused:
            self._check_use()
        self._used = [used or here for used, here in zip(self._used, self._here, strict=True)]
        self._accumulator.feed([self._taken(parameter) for parameter in self._parameters])
        if self.sync:
            self._average()

    def _average(self) -> None:
        for parameter, total in zip(self._parameters, self._accumulator.take(), strict=True):
            parameter.grad = total
        for index in range(len(self._buckets)):
            self._send(index)
        self.courier.drain()
        self._here, self._used = self._used, [False] * len(self._used)
        if self._allow_unused:
            self._mark_unused()

    def _taken(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Take a micro-batch's gradient away from its parameter; the next one begins from nothing."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return torch.zeros_like(parameter)
        return gradient if gradient.is_contiguous() else gradient.contiguous()
