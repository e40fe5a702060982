"""What the launcher, the controller actor and the ranks of a run on Ray send each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.engines.ray.sources import SourceArchive

RayMessage = dict[str, Any]


@dataclass(frozen=True)
class RayRunSpec:
    """The settings of a run for Ray Train."""

    workers: int | tuple[int, int]
    resources: dict[str, float]
    use_gpu: bool
    placement: str
    max_failures: int
    storage: str
    name: str
    own_ray: bool
    """Whether the Ray was started for this run and ends with it."""


@dataclass(frozen=True)
class RankOrder:
    """What every rank runs."""

    archive: SourceArchive
    env: dict[str, str]
    threads: int | None
    """Compute threads per rank; None: the cores of the node shared evenly."""
    max_restarts: int
