"""What the parts of a training loop share: what is trained, and how far the run is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from phalanx.config import DistributedConfig
from phalanx.loop.formation import Formation
from phalanx.loop.hooks import Hooks
from phalanx.loop.loader import PreparedLoader
from phalanx.loop.optim import LRSchedule, OptimizerSettings
from phalanx.loop.optimizer_binding import OwnSchedule
from phalanx.loop.reporting import Reporter
from phalanx.loop.stopping import RunControl
from phalanx.loop.task import TrainTask
from phalanx.observe.history import History

if TYPE_CHECKING:
    from phalanx.loop.checkpoint_policy import CheckpointPolicy
    from phalanx.loop.checks import RankChecks
    from phalanx.loop.forward import Forward
    from phalanx.loop.last_finite import LastFinite
    from phalanx.loop.training_step import TrainingStep


@dataclass
class TrainState:
    """The objects of one run, made by `TrainLoop`; its parts get this, and what else they use."""

    formation: Formation
    task: TrainTask
    model: nn.Module
    """The model as the strategy has wrapped it; `task.model` is the user's."""
    optimizer: Any
    user_step: TrainingStep | None
    """Calls the user's `training_step`, if the task has one."""
    train_loader: PreparedLoader
    val_loader: PreparedLoader | None
    total_steps: int | None
    """The optimizer steps of the whole run, if they are known beforehand."""
    schedule: LRSchedule | OwnSchedule
    optimizer_settings: OptimizerSettings | None
    """The settings of an optimizer that the config describes."""
    hooks: Hooks
    control: RunControl
    checkpoints: CheckpointPolicy
    report: Reporter
    checks: RankChecks | None
    regrouped: bool = False
    """Whether the group of ranks has changed, so that other ranks may have begun this run."""
    continues: bool = False
    """Whether the state is one of this run, from before the group of ranks changed."""
    forward: Forward | None = None
    """How the model is called; None before the first batch."""
    last_finite: LastFinite | None = None

    @property
    def config(self) -> DistributedConfig:
        """The settings of the run."""
        return self.formation.config

    @property
    def step(self) -> int:
        """Optimizer steps taken so far, over all resumptions."""
        return self.formation.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.train_loader.epoch

    @property
    def history(self) -> History:
        """What has been measured so far."""
        return self.report.history

    def is_finished(self, *, within_epoch: bool = False) -> bool:
        """Whether no step is left; `within_epoch`: apart from the number of epochs."""
        if self.control.ending.early or (self.total_steps is not None and self.step >= self.total_steps):
            return True
        if within_epoch:
            return False
        epochs = max_epochs(self.config)
        return epochs is not None and self.epoch >= epochs


def max_epochs(config: DistributedConfig) -> int | None:
    """Return the number of epochs; None if only max_steps counts."""
    return config.epochs or (None if config.max_steps is not None else 1)


def count_steps(formation: Formation, loader: PreparedLoader) -> int | None:
    """Return the number of optimizer steps of the whole run, if it is known beforehand."""
    steps_left, most = loader.steps_left(max_epochs(formation.config)), formation.config.max_steps
    return most if steps_left is None else int(min(formation.step + steps_left, most or math.inf))
