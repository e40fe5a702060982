"""Gradients averaged during the backward pass, like torch's DDP but on the collectives of Phalanx.

Gradients are gathered into buckets, the last layer's first. When a bucket is full, and all buckets before it have been
submitted, the communication thread averages it over the ranks while backward computes the rest; the rank itself
averages the last one. Gradients are views of the buckets, which lie in shared memory where ranks share it: nothing is
copied to send it or back.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.function import BackwardCFunction

from phalanx import torch_compat
from phalanx.comm.comm_thread import CommThread
from phalanx.comm.compress import Compressor
from phalanx.comm.exchange import Bucket, Exchange, plan_buckets
from phalanx.errors import CommunicationError, ModelError, PhalanxError, unused_parameters
from phalanx.observe.call_ring import GRADIENTS

_ALIGNMENT = 64
"""Bytes to which buckets are aligned in their common memory: a cache line, and a multiple of every dtype."""
_NOT_REENTRANT = "Checkpoint activations without reentrant autograd (use_reentrant=False)."


class BackwardHooks(ABC):
    """Takes the gradients of some parameters during each backward pass, and finishes when it ends."""

    _takes_every_pass = False
    """Whether gradients are also taken in the micro-batches of a step that do not average."""

    def __init__(self, named_parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.sync = True
        """Whether the gradients are averaged at the end of a backward pass: false until a step's last micro-batch."""
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._pass: int | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters whose gradients are taken."""
        return self._parameters

    def _hook(self, number: int) -> Callable[[torch.nn.Parameter], None]:
        def gradient_is_there(parameter: torch.nn.Parameter) -> None:
            if self.sync or self._takes_every_pass:
                if torch_compat.backward_pass_id() != self._pass:
                    self._begin()
                self._take(number)

        return gradient_is_there

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self) -> None:
        """Register `_finish` at the first gradient of a backward pass."""
        if self._pass is not None:  # a pass is still running, or was ended by an error that user code caught
            if is_nested():
                raise _reentrant("began before the pass around it had ended")
            if self._forget_pass():
                raise CommunicationError(
                    "the backward pass before this one broke off after some of its gradients were sent",
                    hint="The ranks no longer agree. Let the error end the run, and resume from a checkpoint.",
                )
        self._pass = torch_compat.backward_pass_id()
        torch_compat.call_after_backward(self._finish)

    @abstractmethod
    def _take(self, number: int) -> None:
        """Take the gradient that a parameter has now."""

    @abstractmethod
    def _forget_pass(self) -> bool:
        """Drop the state of an interrupted pass; return whether some of its gradients were sent."""

    @abstractmethod
    def _finish(self) -> None:
        """Complete a backward pass."""

    def _check_dense(self, number: int, gradient: torch.Tensor) -> None:
        """Raise for gradients that cannot be averaged in place."""
        if gradient.requires_grad:
            raise ModelError(
                "backward(create_graph=True) keeps the graph of gradients, which averaging would cut",
                hint="Take such gradients with torch.autograd.grad, and backward without create_graph.",
            )
        if gradient.layout is not torch.strided:
            raise ModelError(
                f"{self._names[number]} has a sparse gradient, which is not averaged here",
                hint="Build the embedding with sparse=False, or use strategy='parameter-server'.",
            )

    def _second_gradient(self, number: int) -> ModelError:
        return ModelError(
            f"{self._names[number]} got a second gradient in one backward pass, after the first was sent",
            hint=_NOT_REENTRANT,
        )

    def _unused(self, numbers: Sequence[int], where: str) -> PhalanxError:
        """Return the error for parameters without a gradient; a nested pass has only some of them."""
        names = [self._names[number] for number in numbers]
        if is_nested():
            return _reentrant(f"ended without {len(names)} of {len(self._names)} gradients, such as {names[0]}'s")
        return unused_parameters(names, where)


def is_nested() -> bool:
    """Whether this is called by a backward pass that an autograd function runs within its own backward."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
    return False


def _reentrant(problem: str) -> ModelError:
    return ModelError(
        f"a backward pass within the backward of an autograd function, as reentrant checkpointing runs it, {problem}",
        hint=_NOT_REENTRANT,
    )


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
        trained = [number for number in self._every if self._parameters[number].requires_grad]
        if self._compressor.name == "none" and trained and trained != self._order:  # else zeros are sent
            self._detach_gradients()
            self._build(trained)

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
        self._arrived = [False] * len(self._parameters)

    def _take(self, number: int) -> None:
        index = self._bucket_of[number]
        if self._arrived[number]:
            if index < self._next:
                raise self._second_gradient(number)
            return
        if self._arrivals is not None:
            self._arrivals.append(number)
        self._arrived[number] = True
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
        self._arrived = [parameter.grad is not None for parameter in self._parameters]
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
        needs_gradient = [parameter.requires_grad for parameter in self._parameters]
        unused = [number for number, arrived in enumerate(self._arrived) if needs_gradient[number] and not arrived]
        if unused and not self._allow_unused:
            raise self._unused(unused, f"on rank {self._exchange.rank}, in backward pass {self._passes}")

    def _mark_unused(self) -> None:
        """Give parameters that another rank used the average, and those that no rank used no gradient."""
        used = torch.tensor(self._arrived, dtype=torch.uint8, device=self._memory.device)
        self._exchange.all_reduce(used, "max")
        anywhere = used.tolist()
        for number, parameter in enumerate(self._parameters):
            if not self._arrived[number] and number in self._bucket_of:
                index = self._bucket_of[number]
                part = self._buckets[index].parts[self._members[index].index(number)]
                parameter.grad = part if anywhere[number] else None

    def _reorder(self, arrivals: list[int]) -> None:
        """After the first pass, lay the buckets out in the order in which rank 0's gradients arrived."""
        arrived = set(arrivals)
        missing = [number for number in self._order if number not in arrived]
        numbers = torch.tensor([*arrivals, *missing], device=self._memory.device)
        order = self._exchange.all_gather(numbers)[0].tolist()
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
