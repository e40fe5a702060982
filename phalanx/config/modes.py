"""The modes `fast` and `memory`: one name for several settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.config.settings import FIELDS

MODES: dict[str, dict[str, Any]] = {
    "memory": {
        "compile": True,
        "activation_checkpointing": "budget 0.4",
        "optimizer": "adamw8bit",
        "capture": False,  # a graph has memory of its own
    },
    "fast": {"mixed_precision": "fp8", "compile": True},
}
"""Aliases of several settings; each of these may be given beside one, and then wins. Of two modes the first wins."""


def mode_settings(name: str, on: bool) -> dict[str, Any]:
    """Return the settings of a mode; turned off, in a later source than the one that has turned it on, the defaults."""
    return MODES[name] if on else {setting: FIELDS[setting].default for setting in MODES[name]}


def without_compile(values: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return how the memory mode recomputes activations beside compile = false: a budget is for compiled blocks."""
    return {"activation_checkpointing": True} if mode == "memory" and values.get("compile") is False else {}
