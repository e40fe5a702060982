"""What a callback may use of the trainer that it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import nn

from phalanx.config import DistributedConfig
from phalanx.loop.formation import Formation
from phalanx.loop.loader import PreparedLoader
from phalanx.loop.values import Values
from phalanx.observe.history import History


class RunningTrainer(Protocol):
    """The `trainer` that a callback gets: the run in progress on this rank."""

    @property
    def config(self) -> DistributedConfig:
        """The settings of the run."""

    @property
    def formation(self) -> Formation:
        """The ranks of the run: `rank`, `world_size`, `is_main`, `reduce`, `gather`, `unwrap`."""

    @property
    def model(self) -> nn.Module:
        """The model as the strategy has wrapped it; `formation.unwrap(model)` is yours."""

    @property
    def optimizer(self) -> Any:
        """The optimizer; with a `training_step`, the optimizers by name."""

    @property
    def train_loader(self) -> PreparedLoader:
        """This rank's share of the training data."""

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""

    @property
    def step(self) -> int:
        """Optimizer steps taken so far, over all resumptions."""

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""

    @property
    def max_epochs(self) -> int | None:
        """The number of epochs; None if only max_steps counts."""

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps of the whole run, if it is known beforehand."""

    @property
    def global_batch(self) -> int:
        """The samples of a step over all ranks."""

    @property
    def history(self) -> History:
        """What has been measured so far."""

    def request_stop(self, reason: str = "stopped by a callback") -> None:
        """End training after this step; every rank must call this at the same step. `reason`: for the summary."""

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the validation data now, on all ranks."""

    def log(self, values: Values, value: Any = None, *, step: int | None = None, reduce: str | None = None) -> None:
        """Record your own numbers: `trainer.log({"teacher": loss})`. See `phalanx.log`."""
