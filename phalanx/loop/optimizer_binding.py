"""User optimizers and learning-rate schedulers bound to the step transaction."""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError, a_type
from phalanx.loop.gradients import Gradients
from phalanx.strategies.optimizer_state import match_layouts


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

    if hasattr(inner_step, torch_compat.SCHEDULED_MARK):  # a scheduler made before marked it, and would miss its mark
        setattr(step, torch_compat.SCHEDULED_MARK, True)

    def zero_grad(set_to_none: bool = True) -> None:
        if gradients.zeroed(optimizer):
            return
        if not set_to_none:
            inner_zero(set_to_none=False)
            return
        # What torch does, without its profiling range: tens of microseconds per step.
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
            optimizer.__dict__.pop(name, None)
            if value is not None:
                optimizer.__dict__[name] = value

    return undo


_BOUND = ("step", "state_dict")


def bind_scheduler(scheduler: LRScheduler, gradients: Gradients) -> Callable[[], None]:
    """Let a scheduler step only when its optimizer has taken a step since it last did; return what undoes it.

    So it stands still between step boundaries and after a skipped step, whether it is called per step or per epoch.
    """
    inner_step, inner_state = scheduler.step, scheduler.state_dict
    last_step = 0

    def step(*arguments: Any, **named: Any) -> None:
        nonlocal last_step
        steps = gradients.taken(scheduler.optimizer)
        if steps is None or steps > last_step:
            last_step = steps or 0
            inner_step(*arguments, **named)

    def state_dict() -> dict[str, Any]:  # torch takes every attribute for state, these two functions included
        return {name: value for name, value in inner_state().items() if name not in _BOUND}

    scheduler.step = step  # type: ignore[method-assign]
    scheduler.state_dict = state_dict  # type: ignore[method-assign]

    def undo() -> None:
        for name in _BOUND:
            scheduler.__dict__.pop(name, None)

    return undo


class OwnSchedule:
    """A scheduler of the user's instead of the config's, stepped per epoch or per optimizer step.

    Its progress is part of its state (`last_epoch`), so a resumed run continues where the checkpoint was. Where it
    began is part of the run's: the same scheduler may have been stepped before the run.
    """

    def __init__(self, scheduler: LRScheduler, position: Callable[[int], int]) -> None:
        """`position`: how often it should have been stepped before the step with this number (from 0)."""
        self.scheduler = scheduler
        self._position = position
        self._first = _progress(scheduler)

    def apply(self, step: int) -> None:
        """Step the scheduler until it has reached the run's position (steps count from 0)."""
        self._step_until(step, self.scheduler.step)

    def end(self, step: int) -> None:
        """Step as after the last step, where the run ends: the next one continues from there, as in a torch loop."""
        # Not the bound step: a rank that was replaced after the last step has taken none itself.
        self._step_until(step, partial(type(self.scheduler).step, self.scheduler))

    def _step_until(self, step: int, advance: Callable[[], None]) -> None:
        while _progress(self.scheduler) < self._first + self._position(step):
            with warnings.catch_warnings():  # torch looks for its own wrapper of optimizer.step, which was replaced
                warnings.filterwarnings("ignore", message=".*(optimizer|lr_scheduler)", category=UserWarning)
                before = _progress(self.scheduler)
                advance()
            if _progress(self.scheduler) <= before:
                name = type(self.scheduler).__name__
                raise UsageError(
                    f"scheduler = {name}(...): its step() does not raise last_epoch, by which its progress is known",
                    hint="Call super().step() in it, or step it in a callback.",
                )

    def reshape(self, factor: Callable[[int], float]) -> None:
        """Do nothing: the user's scheduler does not depend on the length of the run."""

    def keeps_rates(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing: the scheduler's own state says which rates follow."""
        return nullcontext()

    def put_back(self) -> None:
        """Do nothing: the user's scheduler has set the rates, and continues from them."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the scheduler was when the run began; the scheduler itself is saved among the prepared ones."""
        return {"first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count from where the resumed run began."""
        self._first = state.get("first", self._first)

    @property
    def rate(self) -> float:
        """The first group's current learning rate."""
        return float(self.scheduler.optimizer.param_groups[0]["lr"])


def _progress(scheduler: LRScheduler) -> int:
    """Return how often a scheduler was stepped."""
    counted = torch_compat.chained_schedulers(scheduler)[0] if isinstance(scheduler, ChainedScheduler) else scheduler
    return int(counted.last_epoch)


def check_scheduler(scheduler: Any, optimizer: Any, interval: str, config: DistributedConfig) -> None:
    """Raise for what cannot schedule the rate, and for settings that would set it too."""
    if scheduler is None:
        return
    if interval not in ("epoch", "step"):
        raise UsageError(f"scheduler_interval = {interval!r}: not one of 'epoch', 'step'.")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "scheduler = ReduceLROnPlateau(...) is stepped with a metric, which only your code chooses",
            hint="Step it in a callback: on_epoch_end(trainer, epoch, metrics) calls scheduler.step(metrics['loss']).",
        )
    if not isinstance(scheduler, LRScheduler) and (not callable(scheduler) or isinstance(scheduler, type)):
        raise UsageError(
            f"scheduler = {scheduler!r}: expected a torch LRScheduler, or a function that makes one of an optimizer",
            hint="Write scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=100).",
        )
    if isinstance(scheduler, LRScheduler) and scheduler.optimizer is not optimizer:
        raise UsageError(
            "the scheduler's optimizer is not the one that was given to the trainer",
            hint="Write optimizer=optimizer, scheduler=scheduler; or scheduler=lambda optimizer: ... for any of them.",
        )
    defaults = {"lr_schedule": "constant", "warmup": 0, "lr_scaling": "none"}
    twice = [f"{name} = {getattr(config, name)!r}" for name, off in defaults.items() if getattr(config, name) != off]
    if twice:
        raise UsageError(
            f"scheduler=... and {', '.join(twice)} both set the learning rate", hint="Leave one of them out."
        )


def make_scheduler(factory: Any, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return the user's scheduler, or what the user's function makes, over the optimizer that trains."""
    scheduler = factory if isinstance(factory, LRScheduler) else factory(optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(f"the scheduler factory returned {a_type(scheduler)}, not a torch LRScheduler")
    if scheduler.optimizer is not optimizer:
        raise UsageError(
            "the strategy steps another optimizer than the scheduler has",
            hint="Give a function that makes the scheduler: scheduler=lambda optimizer: StepLR(optimizer, 10).",
        )
    return scheduler


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the part of a scheduler's state that JSON can hold: its progress. The user's code has its settings."""
    plain: dict[str, Any] = _plain(scheduler.state_dict())
    return plain


def load_scheduler_state(scheduler: LRScheduler, state: dict[str, Any]) -> None:
    """Restore what `scheduler_state` returned."""
    scheduler.load_state_dict({**scheduler.state_dict(), **state})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if _is_plain(item)}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    """Whether JSON gives the same back: a dict with other keys than text (MultiStepLR's milestones) would change."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


class ParameterRemap:
    """Old parameters and their replacements. Old ones are held weakly: they may take a whole model's memory."""

    def __init__(self) -> None:
        self._successors: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter | None]] = {}

    def note(self, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
        """Note the replacement of each parameter, under any of its names; None: it is on another rank."""
        still_here = {id(parameter) for parameter in after.values()}
        for name, old in before.items():
            if id(old) not in still_here and (name in after or id(old) not in self._successors):
                self._successors[id(old)] = (weakref.ref(old), after.get(name))

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of an optimizer that was made before its model was sharded, and lay its states out."""
        for group in optimizer.param_groups:
            moved = [self._successor(optimizer, parameter) for parameter in group["params"]]
            group["params"] = [parameter for parameter in moved if parameter is not None]
        match_layouts(optimizer)

    def _successor(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> nn.Parameter | None:
        old, new = self._successors.get(id(parameter), (None, parameter))
        if old is None or old() is not parameter:
            return parameter
        if parameter in optimizer.state:
            raise UsageError(
                "the optimizer has taken steps already, and its parameters are sharded over the ranks now",
                hint="Prepare the model and the optimizer together, before the first step.",
            )
        return new
