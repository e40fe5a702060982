"""The parameter server: shards that hold parameters and step, workers that push gradients and pull values.

Start with `placement` (who holds what), then `core` (when a step is taken), then `client`.
"""

from phalanx.engines.parameter_server.client import ParameterClient
from phalanx.engines.parameter_server.membership import Rules, ShardSpec
from phalanx.engines.parameter_server.placement import plan_placement
from phalanx.engines.parameter_server.process import ShardProcess

__all__ = ["ParameterClient", "Rules", "ShardProcess", "ShardSpec", "plan_placement"]
