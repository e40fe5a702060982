"""An optimizer's state out of a checkpoint, also where this rank holds none of a group's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

if TYPE_CHECKING:
    import torch
    from torch import nn


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put an optimizer's state and the settings of its groups back; groups go by their place.

    In a pipeline each stage has its own parameters in a group, or none, and a checkpoint keeps the names of one stage:
    those of this rank take their place. torch finds groups by names, so it is shown those that have any.
    """
    here = get_optimizer_state_dict(model, optimizer)["param_groups"]
    groups = [
        {**saved, "params": own["params"]}  # type: ignore[index]
        for saved, own in zip(state["param_groups"], here, strict=True)
    ]
    everything = optimizer.param_groups
    optimizer.param_groups = [group for group in everything if group["params"]]
    try:
        if optimizer.param_groups:
            shown = [group for group in groups if group["params"]]
            set_optimizer_state_dict(model, optimizer, {"state": state["state"], "param_groups": shown})
    finally:
        loaded = iter(optimizer.param_groups)
        optimizer.param_groups = [
            next(loaded) if before["params"] else {**before, **saved, "params": []}
            for before, saved in zip(everything, groups, strict=True)
        ]
