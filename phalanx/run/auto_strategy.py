"""The strategy of a run that names none: DDP, or fsdp where copies of the training state would not fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.config.backends import DEFAULT_STRATEGY
from phalanx.config.settings import settings_with
from phalanx.features import feature
from phalanx.host.gpus import count_gpus, gpu_memory, ranks_per_gpu
from phalanx.host.processes import host_memory
from phalanx.world.env import read_rank_env

_STATE_BYTES = 16
"""Of one parameter with AdamW: weights, gradients and optimizer states, in fp32 or in mixed precision."""


class StrategyChoice(NamedTuple):
    """A config whose strategy is decided, and why it was changed (empty: it was not)."""

    config: DistributedConfig
    note: str = ""


def settle_here(config: DistributedConfig, model: nn.Module, train: Any) -> StrategyChoice:
    """Decide in a rank that a launcher started; see `settle_strategy`."""
    env = read_rank_env()
    if env is None:
        return StrategyChoice(config)
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return settle_strategy(config, model, train, device, env.planned or env.world_size, env.local_world_size)


def settle_strategy(
    config: DistributedConfig, model: nn.Module, train: Any, device: str, ranks: int, ranks_here: int
) -> StrategyChoice:
    """Choose fsdp where strategy = "auto" and whole copies of the training state would not fit on the ranks.

    The planner decides (`phalanx/tools/plan/auto.py`). It is asked only where nothing was chosen by the user and the
    there are enough parameters for it to matter: all ranks have the same facts, and decide alike.
    """
    undecided = config.strategy == "auto" and config.resolved_strategy == DEFAULT_STRATEGY
    chosen = config.changed("backend", *settings_with("layout"))
    if ranks == 1 or not undecided or chosen:
        return StrategyChoice(config)
    memory = rank_bytes(device, ranks_here)
    if not memory or not is_large(model, memory):
        return StrategyChoice(config)
    return StrategyChoice(*feature("choose-strategy")(config, model, train, device, ranks, memory))


def is_large(model: nn.Module, memory: int) -> bool:
    """Whether the states of a model's parameters take a quarter of a rank's memory or more."""
    return sum(parameter.numel() for parameter in model.parameters()) * _STATE_BYTES > memory / 4


def rank_bytes(device: str, ranks_here: int) -> int:
    """Return a rank's share of its GPU's memory, or of the host's; 0: not known."""
    if device == "cuda":
        return gpu_memory() // ranks_per_gpu(ranks_here, count_gpus())
    return host_memory() // ranks_here
