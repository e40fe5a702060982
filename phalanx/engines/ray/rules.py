"""Options of Ray; it has no rules beyond those of all backends."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.option import option
from phalanx.config.rules import Rule


@dataclass(frozen=True, kw_only=True)
class RayClusterOptions:
    """What a Ray cluster reserves for each rank, and where."""

    cpus_per_worker: float = option(1.0, "CPU cores that each rank reserves", above=0)
    resources: str | None = option(
        None,
        "other resources of each rank: resources.GPU=0.5,resources.big_memory=1 (default: a GPU if ranks use them)",
    )
    placement: str = option(
        "pack",
        "ranks on as few machines as possible (pack) or as many (spread); strict: or the run does not start",
        choices=("pack", "spread", "strict-pack", "strict-spread"),
    )


RULES: tuple[Rule, ...] = ()
OPTIONS = RayClusterOptions.__dataclass_fields__
