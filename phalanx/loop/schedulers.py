"""The user's own learning-rate schedulers: in step with their optimizer, and in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim.lr_scheduler import LRScheduler

    from phalanx.loop.gradients import Gradients

_BOUND = ("step", "state_dict")


def bind_scheduler(scheduler: LRScheduler, gradients: Gradients) -> Callable[[], None]:
    """Let a scheduler step only where its optimizer has taken a step since it last did; return what undoes it.

    So it stands still between step boundaries and after a skipped step, whether it is called per step or per epoch.
    """
    inner_step, inner_state = scheduler.step, scheduler.state_dict
    seen = 0

    def step(*arguments: Any, **named: Any) -> None:
        nonlocal seen
        taken = gradients.taken(scheduler.optimizer)
        if taken is None or taken > seen:
            seen = taken or 0
            inner_step(*arguments, **named)

    def state_dict() -> dict[str, Any]:  # torch takes every attribute for state, these two functions included
        return {name: value for name, value in inner_state().items() if name not in _BOUND}

    scheduler.step = step  # type: ignore[method-assign]
    scheduler.state_dict = state_dict  # type: ignore[method-assign]

    def undo() -> None:
        for name in _BOUND:
            scheduler.__dict__.pop(name, None)

    return undo


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Return what of a scheduler's state JSON can hold: its progress. Its settings are the user's code to repeat."""
    return _plain_dict(scheduler.state_dict())


def load_scheduler_state(scheduler: LRScheduler, state: dict[str, Any]) -> None:
    """Put back what `scheduler_state` returned."""
    scheduler.load_state_dict({**scheduler.state_dict(), **state})


def _plain_dict(values: dict[Any, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in values.items() if _is_plain(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _plain_dict(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    """Whether JSON gives the same back: a dict with other keys than text (MultiStepLR's milestones) would change."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
