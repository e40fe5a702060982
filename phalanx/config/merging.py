"""Settings of several sources: a later one wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRACKERS = ("tensorboard", "mlflow", "wandb")
"""Settings that are false, true or a name."""


def merge(values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a later source, which win; a tracker that is turned on keeps an earlier name."""
    named = {name: values[name] for name in TRACKERS if later.get(name) is True and isinstance(values.get(name), str)}
    return {**values, **later, **named}
