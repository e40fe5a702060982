"""The shape of a model that was built or that a run recorded: by its dimensions, or by a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.models.contract import recorded_dimensions
from phalanx.tools.plan.hf_config import FAMILIES, from_config
from phalanx.tools.plan.model import ModelShape


def shape_of(model: object, name: str = "") -> ModelShape | None:
    """Return the dimensions of a transformer of Phalanx or Hugging Face; None for another model."""
    return recorded_shape(recorded_dimensions(model), name)


def recorded_shape(recorded: Mapping[str, Any], name: str = "") -> ModelShape | None:
    """Return the shape of what `recorded_dimensions` gave; None where it does not describe the model."""
    name = name or recorded.get("name", "")
    if "dimensions" in recorded:
        return ModelShape(name=name, **recorded["dimensions"])
    if recorded.get("config", {}).get("model_type") not in FAMILIES:
        return None
    try:
        return from_config(recorded["config"], Path(name), name)
    except UsageError:  # a variant of the family that the dimensions do not describe
        return None
