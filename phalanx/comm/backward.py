"""Hooks on a backward pass, called for each gradient when it is ready and at the end; the base of the reducers."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch.autograd.function import BackwardCFunction

from phalanx import torch_compat
from phalanx.errors import CommunicationError, ModelError, PhalanxError, unused_parameters

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


def _reentrant(what: str) -> ModelError:
    return ModelError(
        f"a backward pass within the backward of an autograd function, as reentrant checkpointing runs it, {what}",
        hint=_NOT_REENTRANT,
    )
