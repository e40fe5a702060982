"""Strategies by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.errors import UsageError, unknown_name
from phalanx.strategies.auto import Auto
from phalanx.strategies.compose import Composed
from phalanx.strategies.ddp import DDP
from phalanx.strategies.deepspeed import DeepSpeed
from phalanx.strategies.diloco import DiLoCo
from phalanx.strategies.fsdp import FSDP
from phalanx.strategies.horovod import Horovod
from phalanx.strategies.local_sgd import LocalSGD
from phalanx.strategies.parameter_server import ParameterServer
from phalanx.strategies.ring_ddp import RingDDP

if TYPE_CHECKING:
    from phalanx.config import DistributedConfig
    from phalanx.strategies.base import Strategy
    from phalanx.world.world import World

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (DDP, FSDP, DeepSpeed, Horovod, RingDDP, LocalSGD, DiLoCo, ParameterServer)
}


def build_strategy(config: DistributedConfig, world: World) -> Strategy:
    """Return the strategy that the config names."""
    name = config.resolved_strategy
    if name not in STRATEGIES:
        raise UsageError(unknown_name("strategy", name, STRATEGIES))
    mesh = world.mesh
    if max(mesh.pp, mesh.cp, mesh.tp, config.expert_parallel) > 1:
        return Composed(config, world)
    automatic = name == "ddp" and config.strategy == "auto" and config.compression == "none" and not config.fixed_order
    return Auto(config, world) if automatic else STRATEGIES[name](config, world)
