"""Recipes: a data set, a model and settings as data, built in or written by the user.

By name one is found in `./recipes/NAME.toml`, the user's folder, this package, and the entry point group
`phalanx.recipes` of installed packages, in this order; also by file or by import path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.config.documents import read_document
from phalanx.config.option import load_entry_point
from phalanx.errors import UsageError, unknown_name
from phalanx.recipes.imports import extend_path, is_import_path, load_import
from phalanx.recipes.recipe import Recipe, from_document

__all__ = ["Recipe", "find_recipe", "load_recipe", "recipe_names"]


GROUP = "phalanx.recipes"
_BUILT_IN = Path(__file__).parent
_ENDINGS = (".toml", ".yaml", ".yml")


def folders() -> list[Path]:
    """Return where recipes are found by name, the first ones win."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [Path("recipes"), home / "phalanx" / "recipes", _BUILT_IN]


def recipe_names() -> list[str]:
    """Return the names of all recipes in files: of the current folder, of the user and of this package."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.*") if path.suffix in _ENDINGS})


def load_recipe(name: str) -> Recipe:
    """Return a recipe by name, file or import path; an unknown name is refused with the nearest one."""
    recipe = find_recipe(name)
    if recipe is not None:
        return recipe
    if name.endswith(".py"):
        raise UsageError(
            f"'{name}' is a script, not a recipe", hint=f"To run a script of your own: phalanx train --script {name}"
        )
    hint = ""
    if "." in name:
        module, _, last = name.rpartition(".")
        hint = f"To train a model of your own: phalanx train --model {module}:{last} --data {module}:load_data\n  "
        hint += f"To run a module of your own: phalanx train -m {name}"
    raise UsageError(unknown_name("recipe", name, {*recipe_names(), *_installed()}), hint=hint)


def find_recipe(name: str) -> Recipe | None:
    """Return a recipe by name, file or import path, or None where the name is not known."""
    if name.endswith(_ENDINGS):
        return read_recipe(Path(name))
    if is_import_path(name):
        extend_path([str(Path.cwd())])
        return replace(as_recipe(load_import(name, "recipe"), name), source=name)
    for folder in folders():
        for ending in _ENDINGS:
            if (path := folder / f"{name}{ending}").is_file():
                return read_recipe(path)
    found = load_entry_point(GROUP, name)
    return None if found is None else replace(as_recipe(found, name), source=name)


def _installed() -> list[str]:
    from importlib.metadata import entry_points  # 30 ms to import

    return list(entry_points(group=GROUP).names)


def as_recipe(found: Any, name: str) -> Recipe:
    """Return the recipe that a module of the user holds: a Recipe, a dict, a path, or a function that returns one."""
    try:
        made = found() if callable(found) else found
    except Exception as error:  # it is code of the user
        raise UsageError(f"the recipe '{name}' raised {type(error).__name__}: {error}") from error
    if isinstance(made, Recipe):
        return made
    if isinstance(made, (str, Path)):
        return read_recipe(Path(made))
    if not isinstance(made, Mapping):
        raise UsageError(
            f"'{name}' is a {type(made).__name__}, not a recipe",
            hint='Return a dict: {"model": ..., "data": ..., "settings": {...}}.',
        )
    return from_document(made, name.rpartition(":")[2])


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a TOML or YAML file; its folder is where modules and data of the user are found."""
    document = read_document(path, "recipe")
    if path.parent == _BUILT_IN:
        return replace(from_document(document, path.stem), paths=(), source=path.stem)
    if "recipe" in document:
        return _based_on(load_recipe(str(document.pop("recipe"))), document, path)
    if "model" not in document and "data" not in document:
        raise UsageError(
            f"{path} has neither [model] nor [data], so it is not a recipe",
            hint=f"A file of settings alone goes with a recipe: phalanx train digits --config {path}",
        )
    return replace(from_document(document, path.stem, path.parent), source=str(path.resolve()))


def _based_on(base: Recipe, document: Mapping[str, Any], path: Path) -> Recipe:
    """Return another recipe with the values of a file: its tables change single values, as --set does."""
    nested = {f"{table}.{key}": value for table in document for key, value in _table(document, table, path).items()}
    return replace(base.with_values(nested), source=str(path.resolve()))


def _table(document: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = document[name]
    if isinstance(table, Mapping):
        return table
    raise UsageError(f"{path}: {name} = {table!r} next to 'recipe': expected a table such as [settings] or [model]")
