"""From a preset's name and some changed fields to a config, with errors that name the nearest."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)


def from_preset(model: str, presets: Mapping[str, Config], preset: str, changes: Mapping[str, Any]) -> Config:
    """Return the config `preset` of a model with some of its fields changed."""
    if preset not in presets:
        raise UsageError(unknown_name(f"preset of model '{model}'", preset, presets))
    fields = [field.name for field in dataclasses.fields(presets[preset])]
    for change in changes:
        if change not in fields:
            raise UsageError(unknown_name(f"option of model '{model}'", change, ["preset", *fields]))
    return dataclasses.replace(presets[preset], **changes)
