"""What a command tells the ranks: a recipe as a file, and the settings that were given as variables. No torch here."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from phalanx.launch import CallTarget

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from phalanx.config import DistributedConfig, Resolved
    from phalanx.recipes import Recipe


def recipe_target(recipe: Recipe, config: DistributedConfig, run_dir: Path, folder: Path) -> CallTarget:
    """Write into `folder` what a recipe's ranks are to do, and return what they run."""
    request = {
        "recipe": dataclasses.asdict(recipe),
        "config": config.to_dict(),
        "run_dir": str(run_dir),
    }
    payload = folder / "recipe.json"
    payload.write_text(json.dumps(request), encoding="utf-8")
    return CallTarget("phalanx.worker:run_recipe_file", str(payload))


def given_settings(resolved: Resolved, config: DistributedConfig) -> dict[str, Any]:
    """Return the settings that somebody gave, with the config's values."""
    return {name: getattr(config, name) for name, origin in resolved.origins.items() if origin != "default"}


def settings_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Hand settings down to a trainer inside the script, where its own arguments win."""
    return {f"PHALANX_{name.upper()}": _as_text(value) for name, value in settings.items()}


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
