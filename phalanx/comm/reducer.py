"""Gradients averaged while backward goes on: a DDP of our own, on hooks.

Autograd tells us of each gradient as it is done, the last layer's first. They are gathered into buckets; as soon as a
bucket is full, and all buckets before it are on their way, it goes to the courier, which averages it over the ranks
while backward computes the rest. The last bucket has nothing left to hide behind: the rank takes it itself.

Parameters' gradients are views of the buckets: nothing is copied back, and where ranks share memory the buckets lie in
it, so that nothing is copied to send it either.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from phalanx.comm.bucket import Bucket
from phalanx.comm.bucketing import plan_buckets
from phalanx.comm.courier import Courier
from phalanx.errors import CommunicationError, ModelError, unused_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from phalanx.comm.bucketing import BucketPlan
    from phalanx.comm.compress import Compressor
    from phalanx.comm.exchange import Exchange

_ALIGNMENT = 64
"""Bytes to which buckets are aligned in their common memory: a cache line, and a multiple of every dtype."""


class GradientReducer:
    """Averages the gradients of some parameters over the ranks of an exchange, at the end of each backward pass."""

    _takes_every_pass = False
    """Whether gradients are taken between the micro-batches of a step too, where they are not averaged yet."""

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
        self.sync = True
        """Whether a backward pass ends with averaged gradients; between the micro-batches of a step it does not."""
        self.courier = Courier("phalanx-ring", memory.device)
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._exchange, self._compressor = exchange, compressor
        self._cap = cap_bytes
        self._allow_unused = allow_unused
        # What a compressor keeps back depends on what shares a bucket: with one, buckets stay as they are.
        self._arrivals: list[int] | None = [] if compressor.name == "none" else None
        self._passes = 0
        self._memory = memory  # in one piece: whether there is room for it is known before the first step
        # The layers that forward uses last come first in backward.
        self._build(range(len(self._parameters) - 1, -1, -1))
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]

    def close(self) -> None:
        """Take the hooks off, and give the parameters gradients of their own."""
        for handle in self._handles:
            handle.remove()
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
        self._pass: int | None = None
        self._missing = [len(members) for members in self._members]
        self._next = 0
        self._here = [False] * len(self._parameters)

    def _hook(self, number: int) -> Callable[[torch.nn.Parameter], None]:
        def gradient_is_there(parameter: torch.nn.Parameter) -> None:
            if self.sync or self._takes_every_pass:
                self._take(number)

        return gradient_is_there

    def _take(self, number: int) -> None:
        if torch._C._current_graph_task_id() != self._pass:
            self._begin()
        index = self._bucket_of[number]
        if self._here[number]:
            if index < self._next:
                raise ModelError(
                    f"{self._names[number]} got a second gradient in one backward pass, after its bucket was sent",
                    hint="Checkpoint activations without reentrant autograd (use_reentrant=False).",
                )
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
        """At the first gradient of a backward pass: have its end told to us."""
        if self._pass is not None:  # the pass before broke off, by an error that somebody caught
            sent = self._next
            self._reset()
            if self._arrivals is not None:
                self._arrivals.clear()
            if sent:
                raise CommunicationError(
                    "the backward pass before this one broke off after some of its gradients were sent",
                    hint="Ranks are out of step. Let the error end the run, and go on from a checkpoint.",
                )
        self._pass = torch._C._current_graph_task_id()
        self._passes += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _fill(self, index: int) -> Bucket:
        """Move the gradients of a bucket into it, where they stay."""
        bucket = self._buckets[index]
        parts, gradients = [], []
        for number, part in zip(self._members[index], bucket.parts, strict=True):
            parameter = self._parameters[number]
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad is not part:
                if parameter.grad.requires_grad:
                    raise ModelError(
                        "backward(create_graph=True) keeps the graph of gradients, which averaging would cut",
                        hint="Take such gradients with torch.autograd.grad, and backward without create_graph.",
                    )
                if parameter.grad.layout is not torch.strided:
                    raise ModelError(
                        f"{self._names[number]} has a sparse gradient, which has no place in a bucket",
                        hint="Build the embedding with sparse=False, or use strategy='parameter-server'.",
                    )
                parts.append(part)
                gradients.append(parameter.grad)
                parameter.grad = part
        if parts:
            torch._foreach_copy_(parts, gradients)
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
        unused = [name for name, here in zip(self._names, self._here, strict=True) if not here]
        if unused and not self._allow_unused:
            raise unused_parameters(unused, f"on rank {self._exchange.rank}, in backward pass {self._passes}")

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
