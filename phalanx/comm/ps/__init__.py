"""The parameter server: shards that hold parameters and step, workers that push gradients and pull values.

Start with `Placement` (who holds what), then `ShardCore` (when a step is taken), then `ParameterClient`.
"""

from __future__ import annotations

from phalanx.comm.ps.client import ParameterClient, better_placement, move
from phalanx.comm.ps.membership import Rules, ShardSpec
from phalanx.comm.ps.placement import Piece, Placement, plan_placement, rebalance, spread
from phalanx.comm.ps.process import ShardProcess, listen, serve
from phalanx.comm.ps.shard import ServerShard
from phalanx.comm.ps.state_file import StateSlots

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
