"""Gradients with the same bits at 1, 2, 4 and 8 ranks.

Micro-batches, and then ranks, are added up by the tree of `collectives/fixed_order.py`. Nothing is sent before the last
micro-batch, so it is not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.collectives.fixed_order import TreeAccumulator, check_ranks
from phalanx.comm.exchange import Exchange
from phalanx.comm.reducer import GradientReducer


class FixedOrderReducer(GradientReducer):
    """Averages gradients at the end of a step of `micro_batches` backward passes, in the order of `fixed_order`."""

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
        for parameter in self._parameters:
            parameter.grad = None
        return super()._forget_pass()

    def drop(self) -> None:
        """Drop the micro-batches of a step that will not come."""
        self._accumulator = TreeAccumulator(self._accumulator.count)

    def _take(self, number: int) -> None:
        self._arrived[number] = True

    def _finish_pass(self) -> None:
        if not self._allow_unused:
            self._check_use()
        self._used = [used or arrived for used, arrived in zip(self._used, self._arrived, strict=True)]
        self._accumulator.feed([self._taken(parameter) for parameter in self._parameters])
        if not self.sync:
            return
        for parameter, total in zip(self._parameters, self._accumulator.take(), strict=True):
            parameter.grad = total if parameter.requires_grad else None
        for index in range(len(self._buckets)):
            self._send(index)
        self.comm_thread.drain()
        self._arrived, self._used = self._used, [False] * len(self._used)
        if self._allow_unused:
            self._mark_unused()

    def _taken(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Remove a micro-batch's gradient from its parameter and return it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return torch.zeros_like(parameter)
        return gradient if gradient.is_contiguous() else gradient.contiguous()
