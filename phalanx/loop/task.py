"""What a user hands over to be trained: plain data that crosses to the ranks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import UsageError
from phalanx.loop.optim import build_optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from phalanx.config import DistributedConfig
    from phalanx.loop.forward import LossFn
    from phalanx.loop.metrics import Metric


@dataclass
class TrainTask:
    """Model, data and the optional rest of one training run."""

    model: nn.Module
    train: Any = None
    val: Any = None
    loss_fn: LossFn | None = None
    optimizer: Any = None
    metrics: Mapping[str, Metric] | None = None
    callbacks: list[Any] = field(default_factory=list)
    name: str = "model"
    scheduler: Any = None
    scheduler_interval: str = "epoch"


def make_optimizer(task: TrainTask, config: DistributedConfig, device: torch.device) -> torch.optim.Optimizer:
    """Return the task's optimizer: the user's instance, what the user's factory makes, or the config's choice."""
    given = task.optimizer
    if given is None:
        return build_optimizer(config, task.model.parameters(), device)
    if isinstance(given, torch.optim.Optimizer):
        return given
    if callable(given):
        trained = [p for p in task.model.parameters() if p.requires_grad]
        options = {"lr": config.learning_rate} if inspect.isclass(given) else {}
        made: Any = given(trained, **options)
        if isinstance(made, torch.optim.Optimizer):
            return made
        raise UsageError(f"the optimizer factory returned a {type(made).__name__}, not a torch.optim.Optimizer")
    raise UsageError(
        f"optimizer = {given!r}: expected a torch.optim.Optimizer, a factory, or a name",
        hint="Write optimizer=torch.optim.SGD(model.parameters(), lr=0.1), or lambda params: SGD(params, lr=0.1).",
    )


def check_owns(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of another model's parameters."""
    mine = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(p) not in mine for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise UsageError(
            f"{strangers} of the optimizer's parameters do not belong to the model that is to be trained",
            hint="Build the optimizer from model.parameters() of the same model object.",
        )
