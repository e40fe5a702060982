"""The planner: which layout fits a model on a cluster, how fast it is, what it costs, and why.

`phalanx.plan(model, cluster, goal)` returns a `Plan`; `phalanx.plan.estimate(model, cluster, layout, goal)` predicts
one layout. Neither imports torch, unless the model is a module that must be traced.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.tools.plan.cluster import Cluster, Gpu, Link
    from phalanx.tools.plan.estimator import estimate
    from phalanx.tools.plan.layout import Goal, Layout
    from phalanx.tools.plan.model import ModelShape, TracedShape
    from phalanx.tools.plan.planner import make_plan
    from phalanx.tools.plan.prediction import Estimate
    from phalanx.tools.plan.report import Candidate, Plan
    from phalanx.tools.plan.search import Constraints

_HOMES = {
    "Candidate": "report",
    "Cluster": "cluster",
    "Constraints": "search",
    "Estimate": "prediction",
    "Goal": "layout",
    "Gpu": "cluster",
    "Layout": "layout",
    "Link": "cluster",
    "ModelShape": "model",
    "Plan": "report",
    "TracedShape": "model",
    "estimate": "estimator",
    "make_plan": "planner",
}

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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


sys.modules[__name__].__class__ = _CallableModule
