"""Built-in recipes: data, not code. Each is a TOML file naming a data set, a model and settings."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, unknown_name

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """What to train on what, and the settings that suit it."""

    name: str
    summary: str
    data: dict[str, Any]
    model: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    needs_data_dir: bool = False
    presets: tuple[str, ...] = ()
    sample: dict[str, Any] = field(default_factory=dict)

    def settings_for(self, gpus: int) -> dict[str, Any]:
        """Return the settings on a machine with so many GPUs: where those are fewer than the ranks, a rank for each."""
        ranks = self.settings.get("num_workers", 1)
        return {**self.settings, "num_workers": gpus} if 0 < gpus < ranks else self.settings

    def with_preset(self, preset: str | None) -> Recipe:
        """Return the recipe with another size of its model; an unknown one is refused with the nearest."""
        if preset is None:
            return self
        if not self.presets:
            raise UsageError(f"the recipe '{self.name}' has one model, so --preset has nothing to choose from")
        if preset not in self.presets:
            raise UsageError(unknown_name(f"preset of the recipe '{self.name}'", preset, self.presets))
        return replace(self, model={**self.model, "preset": preset})


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_recipe(name: str) -> Recipe:
    """Read a recipe by name; an unknown name is refused with the nearest one."""
    if name not in recipe_names():
        hint = f"To run a script of your own: phalanx train --script {name}" if name.endswith(".py") else ""
        if not hint and "." in name and name.replace(".", "_").isidentifier():
            package, _, last = name.rpartition(".")
            hint = f"A model of your own: --model {package}:{last} --data package:function. A program: -m {name}"
        raise UsageError(unknown_name("recipe", name, recipe_names()), hint=hint)
    document = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return Recipe(
        name,
        document["summary"],
        document["data"],
        document["model"],
        document.get("settings", {}),
        document.get("needs_data_dir", False),
        tuple(document.get("presets", ())),
        document.get("sample", {}),
    )
