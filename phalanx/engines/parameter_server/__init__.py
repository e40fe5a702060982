"""The parameter server: shards that hold parameters and step, workers that push gradients and pull values.

Start with `Placement` (who holds what), then `ShardCore` (when a step is taken), then `ParameterClient`.
"""

from __future__ import annotations

from phalanx.engines.parameter_server.client import ParameterClient, better_placement, move
from phalanx.engines.parameter_server.membership import Rules, ShardSpec
from phalanx.engines.parameter_server.placement import Piece, Placement, plan_placement, rebalance, spread
from phalanx.engines.parameter_server.process import ShardProcess, listen, serve
from phalanx.engines.parameter_server.shard import ServerShard
from phalanx.engines.parameter_server.state import StateSlots

__all__ = [
    "ParameterClient",
    "Piece",
    "Placement",
    "Rules",
    "ServerShard",
    "ShardProcess",
    "ShardSpec",
    "StateSlots",
    "better_placement",
    "listen",
    "move",
    "plan_placement",
    "rebalance",
    "serve",
    "spread",
]
