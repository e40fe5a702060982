"""The rule that Ray's resources can be read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from phalanx.config.option import options_of
from phalanx.config.rules import Mistakes, rule
from phalanx.config.settings import Settings
from phalanx.engines.ray.declaration import RaySettings

UNDER_RAY = "PHALANX_UNDER_RAY"
"""Set in ranks that were started through Ray Train."""


def read_resources(text: object) -> dict[str, float]:
    """Read 'GPU=0.5,big_memory=1'; ValueError says what to write."""
    resources: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in str(text or "").split(","))):
        name, _, amount = (word.strip() for word in part.partition("="))
        if name in resources:
            raise ValueError(f"{name} is given twice: leave one of them out.")
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = math.nan
        if not name or not 0 <= resources[name] < math.inf:
            raise ValueError(f"{part!r} is not a name and an amount: write 'GPU=0.5,big_memory=1'.")
    return resources


def reconcile(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return a table of resources as text: a config is plain data, also as variables of its ranks."""
    resources = values["resources_per_worker"]
    if not isinstance(resources, Mapping):
        return {}, []
    return {"resources_per_worker": ",".join(f"{name}={amount}" for name, amount in resources.items())}, []


@rule("resources_per_worker")
def resources(settings: Settings) -> Mistakes:
    """Check the amounts of resources."""
    try:
        read_resources(options_of(RaySettings, settings).resources_per_worker)
    except ValueError as error:
        yield settings.mistake("resources_per_worker", f": {error}")


RULES = (resources,)
FOR_SCRIPTS = frozenset({"min_workers"})
"""Ray goes on with fewer ranks by itself, those of scripts too."""
