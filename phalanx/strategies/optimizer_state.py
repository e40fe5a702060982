"""An optimizer's state in a checkpoint and out of it, one model's part at a time.

Also where this rank holds none of a group's parameters, and where one optimizer trains several models.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer holds for a model's parameters, under their names; no state before its first step.

    torch takes a step with rate 0 to give a fresh optimizer its state: that would count as one of Adam's steps.
    """
    with _part_of(model, optimizer):
        fresh = not optimizer.state
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    return {**state, "state": {}} if fresh else state


def fill_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a fresh optimizer its state, of any value, for a checkpoint to be read into."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with _part_of(model, optimizer, empty_groups=False):
        get_optimizer_state_dict(model, optimizer)
        made = optimizer.state
    optimizer.state.update(made)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put an optimizer's state for a model and the settings of its groups back; groups go by their place.

    In a pipeline each stage has its own parameters in a group, or none, and a checkpoint keeps the names of one stage:
    those of this rank take their place. torch finds groups by names, so it is shown those that have any.
    """
    own = {id(parameter) for parameter in model.parameters()}
    loaded: dict[Any, Any] = {}
    if state["state"]:
        with _part_of(model, optimizer, empty_groups=False) as places:
            here = get_optimizer_state_dict(model, optimizer)["param_groups"]
            shown = [
                {**state["param_groups"][place], "params": group["params"]}  # type: ignore[index]
                for place, group in zip(places, here, strict=True)
            ]
            if shown:
                set_optimizer_state_dict(model, optimizer, {"state": state["state"], "param_groups": shown})
            loaded = dict(optimizer.state)
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in own]:
        del optimizer.state[parameter]
    optimizer.state.update(loaded)
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})


@contextmanager
def _part_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, empty_groups: bool = True) -> Iterator[list[int]]:
    """Show torch a model's part of an optimizer alone; yield the places of the groups that are shown."""
    own = {id(parameter) for parameter in model.parameters()}
    groups, states = optimizer.param_groups, optimizer.state
    parts = [{**group, "params": [p for p in group["params"] if id(p) in own]} for group in groups]
    places = [place for place, part in enumerate(parts) if part["params"] or empty_groups]
    optimizer.param_groups = [parts[place] for place in places]
    optimizer.state = defaultdict(dict, {p: held for p, held in states.items() if id(p) in own})
    try:
        yield places
    finally:
        optimizer.param_groups, optimizer.state = groups, states
