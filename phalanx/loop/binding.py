"""A user's optimizer bound to the step transaction: its own `step` and `zero_grad` go through it."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from phalanx.loop.gradients import Gradients

_SCHEDULED = "_wrapped_by_lr_sched"
"""torch's own mark on the step of an optimizer that has a scheduler."""


def bind_optimizer(optimizer: torch.optim.Optimizer, gradients: Gradients) -> Callable[[], None]:
    """Route an optimizer's step and zero_grad through the transaction; return what undoes it.

    The instance's own methods are replaced, not the object: schedulers and users keep the optimizer they made.
    """
    before = {name: optimizer.__dict__.get(name) for name in ("step", "zero_grad")}
    inner_step, inner_zero = optimizer.step, optimizer.zero_grad

    def step(self: torch.optim.Optimizer, closure: object = None) -> None:
        if closure is not None:
            raise UsageError("a prepared optimizer takes no closure: compute the loss, call backward, then step()")
        gradients.step(optimizer, inner_step)

    if hasattr(inner_step, _SCHEDULED):  # a scheduler made before marked it, and would miss its mark
        setattr(step, _SCHEDULED, True)

    def zero_grad(set_to_none: bool = True) -> None:
        if not gradients.may_zero(optimizer):
            return
        if not set_to_none:
            inner_zero(set_to_none=False)
            return
        # What torch does, without its profiling range: tens of microseconds a step.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for parameter in gradients.held.strays:
            parameter.grad = None

    # A method, not a bare function: a scheduler made after this one wraps it and asks for __func__.
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def undo() -> None:
        for name, value in before.items():
            if value is None:
                optimizer.__dict__.pop(name, None)
            else:
                optimizer.__dict__[name] = value

    return undo
