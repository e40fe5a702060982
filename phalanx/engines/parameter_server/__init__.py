"""The parameter server: shards that hold parameters and step, workers that push gradients and pull values.

Start with `placement` (who holds what), then `core` (when a step is taken), then `client`. The names here are those
that a program needs for shards of its own.
"""

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.engines.parameter_server.client import ParameterClient
    from phalanx.engines.parameter_server.membership import Rules, ShardSpec
    from phalanx.engines.parameter_server.placement import plan_placement
    from phalanx.engines.parameter_server.process import ShardProcess

__all__ = ["ParameterClient", "Rules", "ShardProcess", "ShardSpec", "plan_placement"]

_NAMES = {
    ".client": "ParameterClient",
    ".membership": "Rules ShardSpec",
    ".placement": "plan_placement",
    ".process": "ShardProcess",
}
__getattr__ = lazy_names(__name__, _NAMES)
