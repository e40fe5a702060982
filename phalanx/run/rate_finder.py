"""The learning-rate finder: a short training in which the rate grows from step to step, and what its losses suggest.

After L. Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), as fastai and Lightning have it: the rate
grows by the same factor in every step, losses are smoothed, and the sweep ends when the loss diverges. The suggestion
is the rate at which the smoothed loss falls most steeply over the logarithm of the rate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from phalanx.config import DistributedConfig
from phalanx.errors import DataError, UsageError
from phalanx.host.files import scratch_folder
from phalanx.loop.hooks import Callback
from phalanx.loop.step_info import StepInfo

if TYPE_CHECKING:
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.loop.train_loop import TrainLoop

_SMOOTHING = 0.9
_DIVERGED = 3.0
"""The sweep ends where the smoothed loss is this many times the lowest one."""
_FIRST_STEPS = 5
"""Steps without a verdict, and not suggested: their mean is not smooth yet."""
_LAST_STEPS = 3
_REACH = 0.5
"""A slope is measured over this power of ten to each side."""
_OFF: dict[str, Any] = {
    "lr_schedule": "constant", "warmup": 0, "lr_scaling": "none", "checkpoint_dir": None, "checkpoint_frequency": None,
    "keep_best": False, "early_stopping": None, "resume_from_checkpoint": False, "tensorboard": False, "mlflow": False,
    "wandb": False, "sinks": None, "metrics_port": None, "max_time": None, "profile": False, "on_nonfinite": "skip",
    "log_every_n_steps": 1, "verbosity": "quiet", "progress": False, "epochs": None,
    "eval_every": 1, "load_best_at_end": False, "fast_dev_run": False,
}  # fmt: skip
"""Settings of a sweep: it leaves no files, and the rate is its own."""


@dataclass(frozen=True)
class RateSweep:
    """The losses of a sweep by rate; `suggestion` is None where the loss never fell."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    ended: str
    """Why it ended."""

    @cached_property
    def slopes(self) -> list[float]:
        """The change of the smoothed loss per tenfold rate around each step: batches differ more than two steps do."""
        places = [math.log10(rate) for rate in self.rates]
        last = len(places) - 1
        reach = max(1, round(_REACH * last / (places[-1] - places[0])))
        pairs = [(max(0, index - reach), min(last, index + reach)) for index in range(len(places))]
        return [(self.smoothed[b] - self.smoothed[a]) / (places[b] - places[a]) for a, b in pairs]

    @property
    def suggestion(self) -> float | None:
        """The rate at which the loss falls most steeply."""
        lowest = self.smoothed.index(min(self.smoothed))
        usable = range(_FIRST_STEPS, min(lowest + 1, len(self.rates) - _LAST_STEPS))
        best = min(usable, key=self.slopes.__getitem__, default=None)
        return None if best is None or self.slopes[best] >= 0 else self.rates[best]


class SweepableTrainer(Protocol):
    """What a sweep takes from the trainer whose model it copies."""

    config: DistributedConfig
    model: nn.Module
    optimizer: Any
    loss_fn: Any
    augment: Any
    training_step: Any


def find_rate(trainer: SweepableTrainer, train: Any, low: float, high: float, steps: int) -> RateSweep:
    """Train a copy of a trainer's model for some steps with a growing rate, and return its losses."""
    if not 0 < low < high or steps < 2 * (_FIRST_STEPS + _LAST_STEPS):
        least = 2 * (_FIRST_STEPS + _LAST_STEPS)
        raise UsageError(
            f"a sweep from {low:g} to {high:g} in {steps} steps: expected 0 < low < high, steps >= {least}"
        )
    if trainer.training_step is not None:
        raise UsageError("a training_step has several optimizers, whose rates are not found together")
    model, optimizer = copy.deepcopy((trainer.model, trainer.optimizer))  # together: one holds the other's parameters
    with scratch_folder("rate") as folder:
        config = trainer.config.replace(**_OFF, run_dir=str(folder / "run"), max_steps=steps)
        make: Any = type(trainer)
        sweep = make(
            model, config, loss_fn=trainer.loss_fn, optimizer=optimizer, augment=trainer.augment,
            scheduler=_RateGrowth(low, high, steps), scheduler_interval="step", callbacks=[_Divergence()],
        )  # fmt: skip
        sweep._tells_end = False  # it ends where the loss diverges, and what it trained is dropped
        history = sweep.fit(train)
    records = [record for record in history.steps if math.isfinite(record["loss"])]
    if len(records) < _FIRST_STEPS + _LAST_STEPS:
        raise DataError(
            f"the sweep ended after {len(records)} steps: {history.reason or 'there are no more batches'}",
            hint="Begin with a lower rate, or give more data.",
        )
    losses = [float(record["loss"]) for record in records]
    rates = [float(record["learning_rate"]) for record in records]
    return RateSweep(rates, losses, smoothed(losses), history.reason or f"{steps} steps were taken")


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the exponentially weighted mean at each place, corrected for its beginning."""
    mean, means = 0.0, []
    for count, loss in enumerate(losses, 1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        means.append(mean / (1 - _SMOOTHING**count))
    return means


@dataclass(frozen=True)
class _RateGrowth:
    """Makes the schedule: the same factor from step to step, for the first parameter group from `low` to `high`."""

    low: float
    high: float
    steps: int

    def __call__(self, optimizer: Optimizer) -> LambdaLR:
        begin = self.low / optimizer.param_groups[0]["lr"]
        growth = (self.high / self.low) ** (1 / (self.steps - 1))
        return LambdaLR(optimizer, _Factor(begin, growth))


@dataclass(frozen=True)
class _Factor:
    begin: float
    growth: float

    def __call__(self, step: int) -> float:
        return float(self.begin * self.growth**step)


class _Divergence(Callback):
    """Ends the sweep where the loss is not finite, or far above its lowest mean; losses are equal on all ranks."""

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """Judge the step: its loss was just read."""
        control = cast("TrainLoop", trainer).control
        records = trainer.history.steps
        if not records or records[-1]["step"] != info.step:  # losses that are not finite are left out
            control.end_early(f"the loss was not finite at the rate {info.learning_rate:.2g}")
            return
        means = smoothed([record["loss"] for record in records])
        lowest = min(means)
        usual = max(abs(lowest), abs(means[0]))  # a loss may be below zero, and near it
        if len(means) > _FIRST_STEPS and means[-1] > lowest + _DIVERGED * usual:
            control.end_early(f"the loss diverged at the rate {info.learning_rate:.2g}")
