"""The help of a recipe, `phalanx train RECIPE --help`: its parts and settings with their values, and their options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.cli.flags import SECTIONS
from phalanx.errors import UsageError, unknown_name
from phalanx.recipes import Recipe, load_recipe
from phalanx.recipes.imports import is_import_path, load_import
from phalanx.zoo.data import maker as data_maker
from phalanx.zoo.models.registry import maker as model_maker
from phalanx.zoo.models.registry import presets

PARTS = ("model", "data", "loss", "augment")
"""The tables of a recipe whose options can be listed."""
_SHOWN = ("model", "data", "loss", "augment", "metrics", "sample")
_REQUIRED = "(required)"


def recipe_help(verb: str, name: str, part: str) -> str:
    """Return the help of a recipe, or of the options of one of its parts; `verb`: such as "phalanx train"."""
    recipe = load_recipe(name)
    if part not in ("", *PARTS):
        problem = unknown_name("part or group of settings", part, (*PARTS, *SECTIONS))
        raise UsageError(problem, hint=f"See {verb} {name} --help")
    if part:
        return _options_help(verb, name, recipe, part)
    data = " --data FILES" if recipe.needs_data else ""
    preset = f" [--preset {'|'.join(recipe.presets)}]" if recipe.presets else ""
    texts = [
        f"usage: {verb} {name}{data}{preset} [--set KEY=VALUE ...] [options]",
        recipe.summary or recipe.name,
        "its parts (change a value with --set):\n" + _columns(_part_rows(recipe)),
    ]
    for title, settings in (("its settings", recipe.settings), ("on GPUs", recipe.gpu_settings)):
        if settings:
            rows = [(f"--{key.replace('_', '-')}", _written(value)) for key, value in settings.items()]
            texts.append(f"{title}:\n" + _columns(rows))
    parts = [part for part in PARTS if part in ("model", "data") or getattr(recipe, part)]
    texts.append(
        f"all options of a part: {verb} {name} --help PART, where PART is one of {', '.join(parts)}\n"
        f"all other options, with their defaults: {verb} --help"
    )
    return "\n\n".join(texts) + "\n"


def _part_rows(recipe: Recipe) -> list[tuple[str, str]]:
    tables = {part: getattr(recipe, part) for part in _SHOWN}
    whole = {part: _as_table(values) for part, values in tables.items()}
    rows = [(f"{part}.{key}", _written(value)) for part, values in whole.items() for key, value in values.items()]
    return rows + [(name, _written(value)) for name in ("optimizer", "callbacks") if (value := getattr(recipe, name))]


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as aligned columns; `observe.format.table` would load all events of a run, for half of the time."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _as_table(values: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a part as a table; a loss may be a name alone, or none."""
    if isinstance(values, str):
        return {"name": values} if values else {}
    return dict(values)


def _options_help(verb: str, name: str, recipe: Recipe, part: str) -> str:
    values = _as_table(getattr(recipe, part))
    if not values:
        raise UsageError(
            f"the recipe '{name}' has no [{part}]",
            hint=f"Its model and data decide. Name one with --set {part}.name=NAME; see {verb} {name} --help",
        )
    chosen = values.pop("name", "")
    make, defaults = _READERS[part](chosen, values)
    rows = [
        (f"--set {part}.{key}=", _written(values.get(key, default)), "" if key not in values else "set by the recipe")
        for key, default in {**defaults, **{key: None for key in values if key not in defaults}}.items()
    ]
    title = f"{part} '{chosen}'" if chosen else part
    about = inspect.getdoc(make) or ""
    if inspect.isclass(make) and make.__init__.__doc__ and not dataclasses.is_dataclass(make):
        about += f"\n\n{inspect.getdoc(make.__init__)}"
    listed = _columns(rows) if rows else "  (none)"
    return f"{verb} {name}: options of the {title}, with their values\n\n{listed}\n\n{about.strip()}\n"


def _of_model(name: str, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    make = model_maker(name)
    defaults = _defaults(make)
    sizes = presets(name) if not is_import_path(name) else {}
    if sizes:
        preset = values.get("preset", defaults["preset"])
        if preset not in sizes:
            raise UsageError(unknown_name("preset", preset, sizes, of=f"model '{name}'"))
        defaults |= dataclasses.asdict(sizes[preset])
    return make, defaults


def _of_data(name: str, _: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    make = data_maker(name)
    return make, {key: value for key, value in _defaults(make).items() if key not in ("split", "root")}


def _of_loss(name: str, _: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    from phalanx.loop.metrics import find_loss

    make: Any = load_import(name, "loss") if is_import_path(name) else find_loss(name)
    if inspect.isclass(make):
        return make, {key: value for key, value in _defaults(make).items() if key != "model"}
    return make, dict(list(_defaults(make).items())[2:])  # after output and target


def _of_augment(name: str, _: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    from phalanx.zoo.data.augment import Augment

    make = load_import(name, "augment") if name else Augment
    return make, {key: value for key, value in _defaults(make).items() if key != "classes"}


_READERS: dict[str, Callable[[str, Mapping[str, Any]], tuple[Any, dict[str, Any]]]] = {
    "model": _of_model,
    "data": _of_data,
    "loss": _of_loss,
    "augment": _of_augment,
}
"""What makes a part, and the defaults of its options, by the name that the recipe gives and its values."""


def _defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a function or class by keyword, each with its default."""
    empty, several = inspect.Parameter.empty, (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(make).parameters.values()
    return {
        one.name: _REQUIRED if one.default is empty else one.default for one in parameters if one.kind not in several
    }


def _written(value: Any) -> str:
    """Return a value as it is written after --set."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_written, value))}]"
    return "-" if value is None else str(value)
