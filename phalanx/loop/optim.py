"""Optimizers by name, learning-rate scaling with the global batch, and the schedule as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.features import feature
from phalanx.loop import optional

_BETA2 = 0.999
"""torch's default, as is a momentum of 0.9."""


def build_optimizer(
    config: DistributedConfig, parameters: Iterable[torch.nn.Parameter], device: torch.device, *, sparse: bool = False
) -> torch.optim.Optimizer:
    """Return the config's optimizer over the trainable parameters, in its fastest implementation.

    `sparse`: an embedding has sparse gradients. Fused implementations take neither these nor complex numbers.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    # torch has fused Adam for sharded parameters, but neither fused SGD nor fused Adagrad.
    sharded = any(isinstance(parameter, DTensor) for parameter in trainable)
    fused = not sparse and not any(parameter.is_complex() for parameter in trainable)
    trained: list[Any] = [{"params": trainable}]  # a group, because it may be empty: a pipeline stage may be frozen
    if not config.decay_norms:
        plain = [parameter for parameter in trainable if parameter.ndim < 2]
        weights = [parameter for parameter in trainable if parameter.ndim > 1]
        trained = [{"params": weights}, {"params": plain, "weight_decay": 0.0}]
    settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    betas = (config.momentum, _BETA2)
    match config.optimizer:
        case "adamw":
            return torch.optim.AdamW(trained, betas=betas, fused=fused, **settings)
        case "adamw8bit":
            return feature("adamw8bit")(trained, betas=betas, **settings)  # type: ignore[no-any-return]
        case "lamb" | "lars":
            if config.optimizer == "lamb":
                return optional.LAMB(trained, betas=betas, **settings)
            return optional.LARS(trained, momentum=config.momentum, **settings)
        case "adam":
            return torch.optim.Adam(trained, betas=betas, fused=fused, **settings)
        case "sgd":
            return torch.optim.SGD(trained, momentum=config.momentum, fused=fused and not sharded, **settings)
        case "rmsprop":
            return torch.optim.RMSprop(trained, momentum=config.momentum, foreach=True, **settings)
        case "adagrad":
            return torch.optim.Adagrad(trained, fused=fused and device.type == "cpu" and not sharded, **settings)
    raise AssertionError(f"the config allowed the optimizer {config.optimizer!r}")


def rate_scale(config: DistributedConfig, global_batch: int, batch_size: int) -> float:
    """Return the factor on the learning rate for this global batch (lr_scaling).

    Without base_batch_size the rate is taken to be chosen for one rank's batch: the ratio is ranks x accumulation.
    """
    if config.lr_scaling == "none":
        return 1.0
    ratio = global_batch / (config.base_batch_size or batch_size)
    return ratio if config.lr_scaling == "linear" else math.sqrt(ratio)


class OptimizerSettings:
    """The config's optimizer settings apart from the rate: after a resume they replace those of the checkpoint."""

    NAMES = ("weight_decay", "momentum", "betas")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [{name: group[name] for name in self.NAMES if name in group} for group in optimizer.param_groups]

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Set them again after loading a state has replaced them."""
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings)


class LRSchedule:
    """The learning rate at each step: a factor on every parameter group's own rate.

    The factor is a function of the step alone. The rate is set only where the factor changes: with a constant schedule
    a callback may steer the rate itself, so a checkpoint holds the factor that was applied last. When the loop is left,
    the optimizer gets its own rates back: they are what the next loop around it begins with.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        scale: float = 1.0,
        *,
        rounded: bool = False,
    ) -> None:
        """`rounded`: to single precision, in which a captured step reads rates, so that one without has the same."""
        self._rounded = rounded
        self._optimizer = optimizer  # not its groups: loading a state replaces them
        self._scale = scale
        self._base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._factor = factor
        self._applied: float | None = None

    def apply(self, step: int) -> None:
        """Set the rate for the step about to be taken (steps count from 0)."""
        factor, groups, group_count = self._factor(step), self._optimizer.param_groups, len(self._base_rates)
        changed = 0 if factor != self._applied else group_count
        if changed == len(groups):
            return
        self._base_rates += [float(group["lr"]) for group in groups[group_count:]]  # add_param_group, while training
        self._applied = factor
        for group, base_rate in zip(groups[changed:], self._base_rates[changed:], strict=True):
            rate = base_rate * self._scale * factor
            _set_rate(group, float(np.float32(rate)) if self._rounded else rate)

    def reshape(self, factor: Callable[[int], float]) -> None:
        """Follow another factor from the next step on: the length of the run has changed."""
        self._factor = factor

    def end(self, step: int) -> None:
        """Give the groups their own rates where the run ends; a rate that a callback has set stays."""
        self.put_back(only_scheduled=True)

    @contextmanager
    def keeps_rates(self) -> Iterator[None]:
        """Give the groups their rates back after a state was loaded that has those of an earlier step."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        yield
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            _set_rate(group, rate)

    def put_back(self, *, only_scheduled: bool = False) -> None:
        """Give the groups their own rates; `only_scheduled`: a rate that a callback has set stays."""
        if self._applied is None:
            return
        # A group that was added after the last step has its own rate still.
        for group, base_rate in zip(self._optimizer.param_groups, self._base_rates, strict=False):
            if not only_scheduled or math.isclose(group["lr"], base_rate * self._scale * self._applied, rel_tol=1e-6):
                _set_rate(group, base_rate)
        self._applied = None

    def state_dict(self) -> dict[str, Any]:
        """Return the factor applied last, and the rates it was applied to."""
        return {"applied": self._applied, "own": self._base_rates, "scale": self._scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the rates from the optimizer's state, unless this run was given others."""
        saved = state.get("own", [])
        if state.get("scale") == self._scale and saved[: len(self._base_rates)] == self._base_rates:
            self._base_rates, self._applied = list(saved), state["applied"]

    @property
    def rate(self) -> float:
        """The first group's current learning rate."""
        return float(self._optimizer.param_groups[0]["lr"])


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate; one that is a tensor stays it, as with torch's schedulers."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def rate_factor(config: DistributedConfig, total_steps: int | None) -> Callable[[int], float]:
    """Return step -> factor: linear warm-up from the first step, then the configured shape down to the last step."""
    warmup = int(config.warmup)
    if isinstance(config.warmup, float) and 0 < config.warmup < 1:
        if total_steps is None:
            raise _needs_length(f"warmup = {config.warmup} is a share of the run")
        warmup = max(1, round(config.warmup * total_steps))
    shape = _shape(config, total_steps, warmup)
    if warmup == 0:
        return shape
    return lambda step: (step + 1) / warmup if step < warmup else shape(step)


def _shape(config: DistributedConfig, total_steps: int | None, warmup: int) -> Callable[[int], float]:
    if config.lr_schedule == "constant":
        return lambda step: 1.0
    if config.lr_schedule == "inverse-sqrt":
        start = max(1, warmup)
        return lambda step: math.sqrt(start / max(start, step + 1))
    if total_steps is None:
        raise _needs_length(f"lr_schedule = {config.lr_schedule!r} falls towards the last step")
    span = max(1, total_steps - warmup)

    def progress(step: int) -> float:
        return min(1.0, (step - warmup) / span)

    if config.lr_schedule == "linear":
        return lambda step: 1.0 - progress(step)
    return lambda step: 0.5 * (1.0 + math.cos(math.pi * progress(step)))


def _needs_length(setting: str) -> UsageError:
    return UsageError(f"{setting}, but the data has no length", hint="Write max_steps = <number of optimizer steps>.")
