"""The parameter server: shards that hold parameters and step, workers that push gradients and pull values.

Start with `Placement` (who holds what), then `ShardCore` (when a step is taken), then `ParameterClient`.
"""

from __future__ import annotations

from phalanx.comm.server.client import ParameterClient
from phalanx.comm.server.placement import Piece, Placement, rebalance, spread
from phalanx.comm.server.plan import better_placement, move, plan_placement
from phalanx.comm.server.process import ShardProcess, listen, serve
from phalanx.comm.server.rules import Rules, ShardSpec
from phalanx.comm.server.saved import StateSlots
from phalanx.comm.server.shard import ServerShard

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
