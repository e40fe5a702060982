"""Gradients averaged during the backward pass, like torch's DDP but on the collectives of Phalanx.

Gradients are gathered into buckets, the last layer's first. When a bucket is full, and all buckets before it have been
submitted, the communication thread averages it over the ranks while backward computes the rest; the rank itself
averages the last one. Gradients are views of the buckets, which lie in shared memory where ranks share it: nothing is
copied to send it or back.

`FixedOrderReducer` gives the same bits at 1, 2, 4 and 8 ranks: it adds up the micro-batches, and then the ranks, by the
tree of `fixed_order`. It sends nothing before the last micro-batch, so it is not for speed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from phalanx import torch_compat
from phalanx.comm.backward import BackwardHooks
from phalanx.comm.buckets import Bucket, plan_buckets
from phalanx.comm.collectives.fixed_order import TreeAccumulator, check_ranks
from phalanx.comm.comm_thread import CommThread
from phalanx.comm.compress import Compressor
from phalanx.comm.exchange import Exchange
from phalanx.observe.collectives import GRADIENTS

_ALIGNMENT = 64
"""Bytes to which buckets are aligned in their common memory: a cache line, and a multiple of every dtype."""


class GradientReducer(BackwardHooks):
    """Averages the gradients of some parameters over the ranks of an exchange, at the end of each backward pass."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        exchange: Exchange,
        compressor: Compressor,
        *,
        cap_bytes: float,
        memory: torch.Tensor,
        allow_unused: bool = False,
    ) -> None:
        super().__init__(named_parameters)
        self.comm_thread = CommThread("phalanx-ring", memory.device)
        self._exchange, self._compressor = exchange, compressor
        self._cap = cap_bytes
        self._allow_unused = allow_unused
        # The residuals of a compressor depend on the layout of the buckets: with one, the layout stays as it is.
        self._arrivals: list[int] | None = [] if compressor.name == "none" else None
        self._passes = 0
        self._memory = memory  # one block: a lack of memory is found before the first step
        # The layers that forward uses last come first in backward.
        self._every: Sequence[int] = range(len(self._parameters) - 1, -1, -1)
        self._build(self._every)

    def close(self) -> None:
        """Remove the hooks, and copy the gradients out of the buckets."""
        self._remove_hooks()
        self._detach_gradients()
        self.comm_thread.close()

    def follow(self) -> None:
        """Leave parameters that are frozen now out of the buckets, and take those back that are not any more."""
        wanted = [number for number in self._every if self._parameters[number].requires_grad]
        if self._compressor.name == "none" and wanted and wanted != self._order:  # else zeros are sent
            self._detach_gradients()
            self._build(wanted)

    def drop(self) -> None:
        """Drop what backward passes have left outside of the parameters."""

    def _detach_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _build(self, order: Sequence[int]) -> None:
        """Lay the gradients out in buckets, in the order in which they are expected."""
        plans = plan_buckets([(n, self._parameters[n].numel(), self._parameters[n].dtype) for n in order], self._cap)
        self._order = list(order)
        self._buckets: list[Bucket] = []
        self._members = [plan.members for plan in plans]
        self._bucket_of = {number: index for index, plan in enumerate(plans) for number in plan.members}
        begin = 0
        for index, plan in enumerate(plans):
            flat = self._memory[begin : begin + plan.nbytes].view(plan.dtype)
            members = [self._parameters[number] for number in plan.members]
            pieces = torch.split_with_sizes(flat, [member.numel() for member in members])
            parts = tuple(_in_the_layout_of(member, piece) for piece, member in zip(pieces, members, strict=True))
            names = tuple(self._names[number] for number in plan.members)
            self._buckets.append(Bucket(index, flat, names, parts))
            begin += _aligned(plan.nbytes)
        self._reset()

    def _reset(self) -> None:
        self._pass = None
        self._missing = [len(members) for members in self._members]
        self._next = 0
        self._here = [False] * len(self._parameters)

    def _take(self, number: int) -> None:
        index = self._bucket_of[number]
        if self._here[number]:
            if index < self._next:
                raise self._second_gradient(number)
            return
        if self._arrivals is not None:
            self._arrivals.append(number)
        self._here[number] = True
        self._missing[index] -= 1
        # Every rank sends its buckets in the same order, not in the order in which they become full.
        while self._next < len(self._missing) - 1 and self._missing[self._next] == 0:
            self._send(self._next)
            self._next += 1

    def _send(self, index: int) -> None:
        bucket = self._fill(index)
        self.comm_thread.submit(functools.partial(self._reduce, bucket))

    def _reduce(self, bucket: Bucket) -> None:
        """Average a bucket, whose number is recorded with the collective."""
        GRADIENTS.bucket = bucket.index + 1
        try:
            self._compressor.reduce(bucket, self._exchange)
        finally:
            GRADIENTS.bucket = 0

    def _begin(self) -> None:
        super()._begin()
        self._passes += 1

    def _forget_pass(self) -> bool:
        sent = self._next
        self._reset()
        if self._arrivals is not None:
            self._arrivals.clear()
        return sent > 0

    def _fill(self, index: int) -> Bucket:
        """Move gradients into their bucket, and make them views of it."""
        bucket = self._buckets[index]
        parts, gradients = [], []
        for number, part in zip(self._members[index], bucket.parts, strict=True):
            parameter = self._parameters[number]
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad is not part:
                self._check_dense(number, parameter.grad)
                parts.append(part)
                gradients.append(parameter.grad)
                parameter.grad = part
        if parts:
            torch_compat.foreach_copy_(parts, gradients)
        return bucket

    def _finish(self) -> None:
        """Send the remaining buckets, and wait for all."""
        try:
            self._finish_pass()
        finally:
            self._reset()

    def _finish_pass(self) -> None:
        # A parameter that only an earlier micro-batch of this step used has a gradient too.
        self._here = [parameter.grad is not None for parameter in self._parameters]
        self._check_use()
        for index in range(self._next, len(self._buckets) - 1):
            self._send(index)
        last = self._fill(len(self._buckets) - 1)
        self.comm_thread.drain()
        self.comm_thread.run(functools.partial(self._reduce, last))
        if self._allow_unused:
            self._mark_unused()
        if self._arrivals is not None:
            self._reorder(self._arrivals)

    def _check_use(self) -> None:
        wanted = [parameter.requires_grad for parameter in self._parameters]
        unused = [number for number, here in enumerate(self._here) if wanted[number] and not here]
        if unused and not self._allow_unused:
            raise self._unused(unused, f"on rank {self._exchange.rank}, in backward pass {self._passes}")

    def _mark_unused(self) -> None:
        """Give parameters that another rank used the average, and those that no rank used no gradient."""
        used = torch.tensor(self._here, dtype=torch.uint8, device=self._memory.device)
        self._exchange.all_reduce(used, "max")
        anywhere = used.tolist()
        for number, parameter in enumerate(self._parameters):
            if not self._here[number] and number in self._bucket_of:
                index = self._bucket_of[number]
                part = self._buckets[index].parts[self._members[index].index(number)]
                parameter.grad = part if anywhere[number] else None

    def _reorder(self, arrivals: list[int]) -> None:
        """After the first pass, lay the buckets out in the order in which rank 0's gradients arrived."""
        arrived = set(arrivals)
        missing = [number for number in self._order if number not in arrived]
        seen = torch.tensor([*arrivals, *missing], device=self._memory.device)
        order = self._exchange.all_gather(seen)[0].tolist()
        self._arrivals = None
        if order != self._order:
            self._every = [*order, *(number for number in self._every if number not in order)]
            self._detach_gradients()
            self._build(order)


def bytes_for(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return how much memory the buckets of some parameters need in any layout."""
    return sum(_aligned(parameter.nbytes) for parameter in parameters)


def _in_the_layout_of(parameter: torch.nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
    """Return a flat piece as a gradient with the memory layout of its parameter (channels_last, transposed)."""
    if torch.empty_like(parameter).stride() == parameter.stride():  # dense: its elements fill the piece, in some order
        return piece.as_strided(parameter.shape, parameter.stride())
    return piece.view(parameter.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


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
        self._here[number] = True

    def _finish_pass(self) -> None:
        if not self._allow_unused:
            self._check_use()
        self._used = [used or here for used, here in zip(self._used, self._here, strict=True)]
        self._accumulator.feed([self._taken(parameter) for parameter in self._parameters])
        if not self.sync:
            return
        for parameter, total in zip(self._parameters, self._accumulator.take(), strict=True):
            parameter.grad = total if parameter.requires_grad else None
        for index in range(len(self._buckets)):
            self._send(index)
        self.comm_thread.drain()
        self._here, self._used = self._used, [False] * len(self._used)
        if self._allow_unused:
            self._mark_unused()

    def _taken(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Remove a micro-batch's gradient from its parameter and return it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return torch.zeros_like(parameter)
        return gradient if gradient.is_contiguous() else gradient.contiguous()
