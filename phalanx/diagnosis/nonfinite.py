"""A run whose loss became NaN or infinite: whether the data were the cause, and what is left of the weights.

Nothing here runs before that. Losses are equal on all ranks, so all ranks come here together and may communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import NonFiniteLossError, error_line

if TYPE_CHECKING:
    from phalanx.loop.train_state import TrainState

_REMEDIES = "Lower learning_rate, set gradient_clipping, or on_nonfinite='skip'; debug='nan' names the module."
_KINDS = ("nan in its inputs", "infinity in its inputs", "nan in its targets", "infinity in its targets")


def nonfinite_error(state: TrainState, problem: str, step: int | None, path: str | None) -> NonFiniteLossError:
    """Report that the run failed, and return the error to raise; all ranks call this.

    `step`: that of the loss, whose batch is read again. `path`: the last checkpoint.
    """
    data, hint = ("", _REMEDIES) if step is None else _look_at_data(state, step)
    last = f"the last good checkpoint is {path}" if path else "there is no checkpoint before it"
    state.report.ended("failed", f"{problem}{data}", state.step, path)
    return NonFiniteLossError(f"{problem}{data}; {last}", hint=hint)


def give_back(state: TrainState, path: str | None) -> str:
    """Load the last checkpoint, which has finite weights, or a copy; return what the caller of fit has now."""
    if path is None:
        step = None if state.last_finite is None else state.last_finite.restore()
        if step is None:
            return "the weights in the model are not finite, and lost"
        return f"the state of step {step}, the last one with finite weights, is in the model"
    gradients = state.formation.gradients
    steps = gradients.steps
    state.formation.load(path)
    checkpoint_step, gradients.steps = gradients.steps, steps  # what the run has trained, not what it has now
    return f"the state of step {checkpoint_step}, that of its last checkpoint, is in the model"


def _look_at_data(state: TrainState, step: int) -> tuple[str, str]:
    """Return what is wrong with a step's batch, as the end of a sentence, and what to do."""
    try:
        flags = _kinds_in(state, step)
    except Exception as error:  # noqa: BLE001 - of the user's data set, which must not hide that the loss is nan
        flags, problem = torch.full((5,), 2), error_line(type(error).__name__, str(error))
    else:
        problem = ""
    flags = state.formation.reduce(flags, "max")
    kinds = [kind for kind, flag in zip(_KINDS, flags.tolist(), strict=False) if flag == 1]
    if flags[4] > 1:
        why = f": {problem}" if problem else ""
        return "", f"{_REMEDIES} The batch of step {step} cannot be read again{why}: look for nan in the data."
    if kinds:
        remedy = (
            "Leave such samples out or replace their values, as torch.nan_to_num does; on_nonfinite='skip' leaves out "
        )
        return f": the batch of step {step} holds {' and '.join(kinds)}", f"{remedy}such steps."
    return "", f"{_REMEDIES} The batch of step {step} is finite." if flags[4] == 1 else _REMEDIES


def _kinds_in(state: TrainState, step: int) -> torch.Tensor:
    """Return a flag for each kind of this rank's share of a step, and last 1 for floats that were looked at.

    The last is 2 if the batch cannot be read again.
    """
    kinds = torch.zeros(5, dtype=torch.int64)
    forward = state.forward
    batches = state.train_loader.sharded.reread(state.step - step)
    if batches is None or forward is None:
        kinds[4] = 2
        return kinds
    for batch in batches:
        target = forward.target(batch)
        targets = [] if target is batch else [id(tensor) for tensor in _floats(target)]
        for tensor in _floats(batch):
            first = 2 if id(tensor) in targets else 0
            kinds[first] |= int(tensor.isnan().any())
            kinds[first + 1] |= int(tensor.isinf().any())
            kinds[4] = 1
    return kinds


def _floats(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of floats in a batch."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floats(item)
