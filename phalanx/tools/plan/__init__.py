"""The planner: recommends a parallel layout for a model on a cluster, and predicts its speed, memory and cost.

`phalanx.plan(model, cluster, goal)` returns a `Plan`; `phalanx.plan.estimate(model, cluster, layout, goal)` predicts
one layout. Neither imports torch, unless the model is a module that must be traced.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.tools.plan.cluster import Cluster, Gpu, Link
    from phalanx.tools.plan.estimator import estimate
    from phalanx.tools.plan.model import ModelShape, TracedShape
    from phalanx.tools.plan.planner import make_plan
    from phalanx.tools.plan.plans import Candidate, Estimate, Goal, Layout, Plan
    from phalanx.tools.plan.search import Constraints


__all__ = [
    "Candidate",
    "Cluster",
    "Constraints",
    "Estimate",
    "Goal",
    "Gpu",
    "Layout",
    "Link",
    "ModelShape",
    "Plan",
    "TracedShape",
    "estimate",
    "make_plan",
]


class _CallableModule(ModuleType):
    """A package that is also the function of its name: `phalanx.plan(...)`."""

    def __call__(self, *arguments: Any, **named: Any) -> Plan:
        """Return the plan: see `make_plan`."""
        plan: Plan = self.make_plan(*arguments, **named)
        return plan


_NAMES = {
    ".cluster": "Cluster Gpu Link",
    ".estimator": "estimate",
    ".model": "ModelShape TracedShape",
    ".planner": "make_plan",
    ".plans": "Candidate Estimate Goal Layout Plan",
    ".search": "Constraints",
}
__getattr__ = lazy_names(__name__, _NAMES)


sys.modules[__name__].__class__ = _CallableModule
