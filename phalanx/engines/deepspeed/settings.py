"""The settings that DeepSpeed's engine is built with: the JSON, with every "auto" filled from the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.config import DistributedConfig
from phalanx.config.settings import precision_name
from phalanx.engines.deepspeed.rules import AUTO, engine_settings, nvme_path, optimizer_name
from phalanx.model import HasHiddenSize, implements

if TYPE_CHECKING:
    from torch import nn

    from phalanx.world.world import World

_BY_WIDTH: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
"""Sizes that depend on the model's width, by the rule of Hugging Face for "auto"."""


def build_settings(config: DistributedConfig, world: World, model: nn.Module) -> dict[str, Any]:
    """Return the settings for `deepspeed.initialize`; explicit settings of the JSON are in the config already."""
    settings = engine_settings(config)
    batch_size = config.batch_size or 1  # a DataLoader may have another; the engine only reports it
    accumulation = config.gradient_accumulation_steps
    settings["train_micro_batch_size_per_gpu"] = batch_size
    settings["gradient_accumulation_steps"] = accumulation
    settings["train_batch_size"] = batch_size * accumulation * world.mesh.dp_size
    settings["gradient_clipping"] = 0.0  # the loop sets it before each step; without it DeepSpeed uses 1.0
    settings.setdefault("steps_per_print", 2**31)  # the loop reports
    settings.pop("scheduler", None)  # taken over as lr_schedule, warmup and learning_rate
    _set_precision(settings, config, world)
    _set_zero(settings, config, model)
    _set_optimizer(settings, config, world)
    return _without_auto(settings)


def _set_precision(settings: dict[str, Any], config: DistributedConfig, world: World) -> None:
    precision = precision_name(config.mixed_precision, world.device.type)
    for name in ("bf16", "fp16"):
        if name in settings or name == precision:
            settings[name] = {**settings.get(name, {}), "enabled": name == precision}


def _set_zero(settings: dict[str, Any], config: DistributedConfig, model: nn.Module) -> None:
    zero: dict[str, Any] = {**settings.get("zero_optimization", {}), "stage": config.zero_stage or 0}
    if config.offload != "none":
        device: dict[str, Any] = {"device": config.offload}
        if config.offload == "nvme":
            device["nvme_path"] = nvme_path(config)
        zero["offload_optimizer"] = {**zero.get("offload_optimizer", {}), **device}
        if config.zero_stage == 3:
            zero["offload_param"] = {**device, **zero.get("offload_param", {})}
    shape = getattr(model, "config", None)
    for name, size in _BY_WIDTH.items():
        if zero.get(name) == AUTO and implements(shape, HasHiddenSize):
            zero[name] = size(shape.hidden_size)  # otherwise DeepSpeed's default
    settings["zero_optimization"] = zero
    settings.setdefault("zero_allow_untested_optimizer", True)  # any torch optimizer steps on flat fp32 partitions


def _set_optimizer(settings: dict[str, Any], config: DistributedConfig, world: World) -> None:
    """Complete the JSON's optimizer, if it names one; otherwise DeepSpeed steps with the user's."""
    section = settings.get("optimizer")
    if section is None or section.get("type", AUTO) == AUTO:
        settings.pop("optimizer", None)
        settings.setdefault("zero_force_ds_cpu_optimizer", False)  # offload steps with the user's optimizer, too
        return
    params = {"lr": config.learning_rate, "weight_decay": config.weight_decay, **section.get("params", {})}
    params |= {name: getattr(config, field) for name, field in _FIELDS.items() if params.get(name) == AUTO}
    if optimizer_name(settings) in ("adam", "adamw") and world.device.type == "cpu":
        params.setdefault("torch_adam", True)  # DeepSpeed's Adam would be compiled first, for minutes
    if params.get("torch_adam"):
        settings.setdefault("zero_force_ds_cpu_optimizer", False)
    settings["optimizer"] = {**section, "params": params}


_FIELDS = {"lr": "learning_rate", "weight_decay": "weight_decay", "momentum": "momentum"}


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    """Drop every remaining "auto", so that DeepSpeed's default applies."""
    decided = {name: value for name, value in settings.items() if value != AUTO}
    return {name: _without_auto(value) if isinstance(value, dict) else value for name, value in decided.items()}
