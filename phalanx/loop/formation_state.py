"""What checkpoints and reports read of a `Formation`, which is above them and uses them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.config import DistributedConfig
    from phalanx.loop.ema import WeightAverage
    from phalanx.loop.gradients import Gradients
    from phalanx.loop.loader import PreparedLoader
    from phalanx.loop.precision import Precision
    from phalanx.observe.step_clock import StepClock
    from phalanx.strategies.base import Strategy
    from phalanx.world.world import World


class FormationState(Protocol):
    """The attributes of a `Formation` that hold the state of this rank; each is described there."""

    strategy: Strategy
    config: DistributedConfig
    world: World
    device: torch.device
    clock: StepClock
    precision: Precision
    gradients: Gradients
    notes: list[str]
    models: list[nn.Module]
    part_names: list[str]
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    loaders: list[PreparedLoader]
    average: WeightAverage | None
    best_path: Path | None
    run_id: str
    state_of: str
    lineage: list[dict[str, Any]]
    trained_anywhere: tuple[tuple[int, ...], list[list[bool]]] | None

    @property
    def rank(self) -> int:
        """This rank's number in the whole job."""

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that prints and publishes."""

    @property
    def step(self) -> int:
        """Optimizer steps taken."""

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its averaged weights, if it has any."""

    def reduce(self, value: float | torch.Tensor, op: str = "mean") -> torch.Tensor:
        """Return the mean (or sum, min, max) of a value over all ranks."""

    def undo_later(self, undo: Callable[[], object]) -> None:
        """Call a function when everything is released."""
