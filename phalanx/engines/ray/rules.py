"""Options of Ray, and the rule that its resources can be read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.config.option import option, read_options
from phalanx.config.rules import Mistakes, rule
from phalanx.config.settings import Settings

UNDER_RAY = "PHALANX_UNDER_RAY"
"""Set in ranks that were started through Ray Train."""


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


def read_resources(text: str | None) -> dict[str, float]:
    """Read 'GPU=0.5,big_memory=1'; ValueError says what to write."""
    found: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in (text or "").split(","))):
        name, _, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            found[name.strip()] = math.nan
        if not name.strip() or not 0 <= found[name.strip()] < math.inf:
            raise ValueError(f"{part!r} is not a name and an amount: write resources.GPU=0.5,resources.big_memory=1.")
    return found


@rule("engine_options")
def resources(settings: Settings) -> Mistakes:
    """Check the amounts of resources."""
    text = read_options(RayClusterOptions, settings.engine_options).resources
    try:
        read_resources(text)
    except ValueError as error:
        yield "resources", f"resources = {text!r}: {error}"


RULES = (resources,)
FOR_SCRIPTS = frozenset({"min_workers"})
"""Ray goes on with fewer ranks by itself, those of scripts too."""
OPTIONS = RayClusterOptions.__dataclass_fields__
