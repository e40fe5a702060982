"""Gradients averaged while backward goes on: a DDP of our own, on hooks.

Autograd tells us of each gradient as it is done, the last layer's first. They are gathered into buckets; as soon as a
bucket is full, and all buckets before it are on their way, it goes to the courier, which averages it over the ranks
while backward computes the rest. The last bucket has nothing left to hide behind: the rank takes it itself.

Parameters' gradients are views of the buckets: nothing is copied back, and where ranks share memory the buckets lie in
it, so that nothing is copied to send it either.

Gradients whose sum has the same bits at 1, 2, 4 and 8 ranks: the reducer in the order of `fixed_order`.

Every micro-batch's gradients are taken out when its backward pass ends, added up by the tree, and averaged over the
ranks by the same tree. Nothing travels before the last micro-batch is there: this is for proofs and for ranks that
come and go, not for speed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from phalanx import torch_compat
from phalanx.comm.backward import BackwardHooks
from phalanx.comm.buckets import Bucket, BucketPlan, plan_buckets
from phalanx.comm.collectives.fixed_order import TreeAccumulator, check_ranks
from phalanx.comm.comm_thread import CommThread
from phalanx.comm.compress import Compressor
from phalanx.comm.exchange import Exchange

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
        self.courier = CommThread("phalanx-ring", memory.device)
        self._exchange, self._compressor = exchange, compressor
        self._cap = cap_bytes
        self._allow_unused = allow_unused
        # What a compressor keeps back depends on what shares a bucket: with one, buckets stay as they are.
        self._arrivals: list[int] | None = [] if compressor.name == "none" else None
        self._passes = 0
        self._memory = memory  # in one piece: whether there is room for it is known before the first step
        # The layers that forward uses last come first in backward.
        self._build(range(len(self._parameters) - 1, -1, -1))

    def close(self) -> None:
        """Take the hooks off, and give the parameters gradients of their own."""
        self._remove_hooks()
        self._detach_gradients()
        self.courier.close()

    def _detach_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _build(self, order: Sequence[int]) -> None:
        """Lay the gradients into buckets, in the order in which they are expected."""
        plans = plan_buckets([(n, self._parameters[n].numel(), self._parameters[n].dtype) for n in order], self._cap)
        self._order = list(order)
        self._buckets: list[Bucket] = []
        self._members = [plan.members for plan in plans]
        self._bucket_of = {number: index for index, plan in enumerate(plans) for number in plan.members}
        begin = 0
        for index, plan in enumerate(plans):
            flat = self._memory[begin : begin + plan.nbytes].view(plan.dtype)
            self._buckets.append(Bucket(index, flat, *self._cut(flat, plan)))
            begin += _aligned(plan.nbytes)
        self._reset()

    def _cut(self, flat: torch.Tensor, plan: BucketPlan) -> tuple[tuple[str, ...], tuple[torch.Tensor, ...]]:
        members = [self._parameters[number] for number in plan.members]
        pieces = torch.split_with_sizes(flat, [member.numel() for member in members])
        parts = tuple(_in_the_layout_of(member, piece) for piece, member in zip(pieces, members, strict=True))
        return tuple(self._names[number] for number in plan.members), parts

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
        # Every rank sends its buckets in one order, whatever the order in which they are full.
        while self._next < len(self._missing) - 1 and self._missing[self._next] == 0:
            self._send(self._next)
            self._next += 1

    def _send(self, index: int) -> None:
        bucket = self._fill(index)
        self.courier.submit(functools.partial(self._compressor.reduce, bucket, self._exchange))

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
        """Move the gradients of a bucket into it, where they stay."""
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
        """At the end of a backward pass: send what is left, and wait for all."""
        try:
            self._finish_pass()
        finally:
            self._reset()

    def _finish_pass(self) -> None:
        # One that only an earlier micro-batch of this step used has a gradient all the same.
        self._here = [parameter.grad is not None for parameter in self._parameters]
        self._check_use()
        for index in range(self._next, len(self._buckets) - 1):
            self._send(index)
        last = self._fill(len(self._buckets) - 1)
        self.courier.drain()
        self.courier.run(functools.partial(self._compressor.reduce, last, self._exchange))
        if self._allow_unused:
            self._mark_unused()
        if self._arrivals is not None:
            self._follow_use(self._arrivals)

    def _check_use(self) -> None:
        unused = [number for number, here in enumerate(self._here) if not here]
        if unused and not self._allow_unused:
            raise self._unused(unused, f"on rank {self._exchange.rank}, in backward pass {self._passes}")

    def _mark_unused(self) -> None:
        """A parameter that some rank used gets the average; one that no rank used keeps no gradient."""
        used = torch.tensor(self._here, dtype=torch.uint8, device=self._memory.device)
        self._exchange.all_reduce(used, "max")
        anywhere = used.tolist()
        for number, parameter in enumerate(self._parameters):
            if not self._here[number]:
                index = self._bucket_of[number]
                part = self._buckets[index].parts[self._members[index].index(number)]
                parameter.grad = part if anywhere[number] else None

    def _follow_use(self, arrivals: list[int]) -> None:
        """After the first pass, lay the buckets out in the order in which rank 0's gradients came."""
        came = set(arrivals)
        missing = [number for number in self._order if number not in came]
        seen = torch.tensor([*arrivals, *missing], device=self._memory.device)
        order = self._exchange.all_gather(seen)[0].tolist()
        self._arrivals = None
        if order != self._order:
            self._detach_gradients()
            self._build(order)


def bytes_for(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return how much memory the buckets of some parameters need, however they are laid out."""
    return sum(_aligned(parameter.nbytes) for parameter in parameters)


def _in_the_layout_of(parameter: torch.nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
    """Return a flat piece as a gradient that lies in memory as its parameter does (channels_last, transposed)."""
    if torch.empty_like(parameter).stride() == parameter.stride():  # dense: its elements fill the piece, in some order
        return piece.as_strided(parameter.shape, parameter.stride())
    return piece.view(parameter.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


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
