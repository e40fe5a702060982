"""What each unit of a model costs: its parameters, or the time that it takes on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx.errors import UsageError
from phalanx.models.contract import ExampleInputs, implements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

_ROUNDS = 3


def parameter_costs(model: nn.Module, units: Sequence[str]) -> list[float]:
    """Return the number of parameters of each unit."""
    return [float(sum(p.numel() for p in model.get_submodule(unit).parameters())) for unit in units]


def measured_costs(model: nn.Module, units: Sequence[str]) -> list[float]:
    """Return the seconds of each unit's forward pass, as rank 0 measures them on the model's `example_inputs()`."""
    if not implements(model, ExampleInputs):
        raise UsageError(
            f"pipeline_balance = 'measured' needs inputs to run, and {type(model).__name__} has no example_inputs()",
            hint="Give it a method example_inputs() that returns what forward takes, or balance by 'parameters'.",
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "pipeline_balance = 'measured' needs a model with weights, and this one is on the meta device",
            hint="Balance by 'parameters', or name the cuts: pipeline_cuts = 'layers.4,layers.8'.",
        )
    costs: list[Any] = [_time_units(model, units, model.example_inputs()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(costs, src=0)
    found: list[float] = costs[0]
    return found


@torch.no_grad()
def _time_units(model: nn.Module, units: Sequence[str], example: Sequence[torch.Tensor]) -> list[float]:
    """Return each unit's quickest of a few forward passes; the first one warms up."""
    device = next(model.parameters()).device
    inputs = tuple(tensor.to(device) for tensor in example)
    best = dict.fromkeys(units, float("inf"))
    began: dict[str, float] = {}

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def watch(unit: str) -> list[Any]:
        def enter(*_: Any) -> None:
            began[unit] = now()

        def leave(*_: Any) -> None:
            best[unit] = min(best[unit], now() - began[unit])

        module = model.get_submodule(unit)
        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    handles = [handle for unit in units for handle in watch(unit)]
    try:
        for _ in range(_ROUNDS):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [best[unit] if best[unit] < float("inf") else 0.0 for unit in units]
