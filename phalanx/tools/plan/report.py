"""The answer of the planner: `Plan`, with the layouts that lost and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.layout import Goal, Layout
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.prediction import Estimate


@dataclass(frozen=True)
class Candidate:
    """A layout that was estimated, and why it was not chosen (empty for the chosen one)."""

    layout: Layout
    estimate: Estimate
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """The chosen layout with everything that explains it."""

    model: ModelShape | TracedShape
    cluster: Cluster
    goal: Goal
    best: Candidate | None
    """None: nothing fits; `smallest_change` says what would."""
    runners_up: tuple[Candidate, ...] = ()
    refused: tuple[tuple[str, int], ...] = ()
    """Reasons with the number of layouts that each refused: ("5 stages do not divide 32 layers", 12)."""
    searched: int = 0
    binding: str = ""
    """The constraint that limits the step, in words."""
    batch: str = ""
    """The arithmetic of the global batch, in words."""
    cost: dict[str, float] = field(default_factory=dict)
    """days, gpu_hours, money (where a price is known), steps."""
    reliability: dict[str, float] = field(default_factory=dict)
    """failures_per_day, checkpoint_seconds, checkpoint_interval_seconds, effective."""
    assumptions: tuple[tuple[str, str, str], ...] = ()
    """(name, value, where it comes from)."""
    sensitivity: tuple[tuple[str, float], ...] = ()
    """(change, relative change of the step time): ("20% less bandwidth between machines", 0.06)."""
    smallest_change: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of `phalanx train` for the chosen layout."""

    @property
    def fits(self) -> bool:
        """Whether a layout was found."""
        return self.best is not None
