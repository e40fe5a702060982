"""Recipes: a data set, a model and settings as data, built in or written by the user.

By name one is found in `./recipes/NAME.toml`, the user's folder, this package, and the entry point group
`phalanx.recipes` of installed packages, in this order; also by file or by import path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from phalanx.config.option import load_entry_point
from phalanx.errors import UsageError, a_type, nearest, unknown_name
from phalanx.features import feature
from phalanx.recipes.imports import check_import, extend_path, import_path_of, is_import_path, load_import

__all__ = ["Recipe", "find_recipe", "load_recipe", "recipe_names"]

GROUP = "phalanx.recipes"
_BUILT_IN = Path(__file__).parents[1] / "zoo" / "recipes"
_ENDINGS = (".toml", ".yaml", ".yml")
_PARTS = ("model", "data")
TABLES = ("model", "data", "settings", "gpu_settings", "sample", "metrics", "loss", "augment")
_HINTS = {
    "model": 'Write [model] with name = "my_package.nets:Net" (or gpt, convnet, ...) and its options below.',
    "data": 'Write [data] with name = "my_package.data:load" (or digits, text, ./my-files, ...) and its options below.',
    "loss": 'Write [loss] with name = "my_package.losses:loss" (or cross_entropy, mse, ...) and its options below.',
}

CONVERSATIONS = ("chats", "preferences", "prompts", "ratings")
_OF_TEXTS = (*CONVERSATIONS, "masked", "pairs", "spans")
"""Data sets whose texts are cut by the tokenizer of a model's folder, where they name none."""


@dataclass(frozen=True)
class Recipe:
    """What to train on what, and the settings that suit it."""

    name: str
    summary: str
    data: dict[str, Any]
    """Its `name` is that of a built-in data set, an import path `package.module:function`, or a path of files."""
    model: dict[str, Any]
    """Its `name` is that of a built-in model, an import path, or the folder of a Hugging Face model."""
    settings: dict[str, Any] = field(default_factory=dict)
    gpu_settings: dict[str, Any] = field(default_factory=dict)
    """Settings for runs on GPUs; they apply where they do not contradict what the user gives."""
    needs_data: bool = False
    """Whether it reads files that the user has to name (--data)."""
    presets: tuple[str, ...] = ()
    sample: dict[str, Any] = field(default_factory=dict)
    loss: str | dict[str, Any] = ""
    """The import path of `loss(output, target)`, or the name of a usual one; a table has a `name` and its options."""
    optimizer: str = ""
    """The import path of a function of the parameters, or of an optimizer class; a name is the setting `optimizer`."""
    metrics: dict[str, str] = field(default_factory=dict)
    """By the name of the result: a name of `phalanx.zoo.scores`, or the import path of `metric(output, target)`."""
    callbacks: tuple[str, ...] = ()
    """Import paths of callback classes, and of functions that are called after each step."""
    augment: dict[str, Any] = field(default_factory=dict)
    """Options of `phalanx.zoo.data.augment.Augment`, or of the function or class that `name` is the import path of."""
    paths: tuple[str, ...] = ()
    """Folders with modules of the user: that of the recipe's file, and the current one."""
    sized: bool = False
    """Whether the model has the sizes that its data tell: a trained model is then built without them."""
    source: str = ""
    """The name, file or import path that finds it again; empty for one made of --model and --data."""

    def settings_for(self, gpus: int) -> dict[str, Any]:
        """Return it as a source of settings for `resolve`; with fewer GPUs than ranks there is one rank for each."""
        ranks = self.settings.get("num_workers", 1)
        settings = {**self.settings, "num_workers": gpus} if 0 < gpus < ranks else self.settings
        return {"recipe": settings, "recipe_name": self.name, "gpu_settings": self.gpu_settings, "on_gpus": gpus > 0}

    def with_preset(self, preset: str | None) -> Recipe:
        """Return the recipe with another size of its model; an unknown one is refused with the nearest."""
        if preset is None:
            return self
        if not self.presets:
            raise UsageError(
                f"the recipe '{self.name}' names no presets, so --preset has nothing to choose from",
                hint=f"A preset of its model is an option of it: --set model.preset={preset}",
            )
        if preset not in self.presets:
            raise UsageError(unknown_name("preset", preset, self.presets, of=f"the recipe '{self.name}'"))
        return replace(self, model={**self.model, "preset": preset})

    def with_parts(self, model: str | None, data: Mapping[str, Any] | None) -> Recipe:
        """Return the recipe with another model, whose options go with it, or other data (`data.sets.named_data`)."""
        changes: dict[str, Any] = {}
        if model is not None:
            changes = {"model": {"name": _located(model, Path.cwd())}, "presets": (), "sample": {}, "sized": False}
        if data is not None:
            changes |= {"data": dict(data), "needs_data": False}
        if changes:
            changes["paths"] = tuple(dict.fromkeys([*self.paths, str(Path.cwd())]))
        return replace(self, **changes)

    def with_values(self, changes: Mapping[str, Any]) -> Recipe:
        """Return the recipe with nested values replaced: `{"model.dropout": 0.1}`."""
        recipe = self
        for path, value in changes.items():
            table, _, key = path.partition(".")
            if table not in TABLES or not key:
                raise UsageError(
                    f"--set {path}: {unknown_name('table', table, TABLES, of='a recipe')}",
                    hint="Write --set model.dropout=0.1, --set data.seq_len=256, or --set batch_size=32.",
                )
            before = getattr(recipe, table)
            before = {"name": before} if isinstance(before, str) else before
            change: dict[str, Any] = {table: _with_nested(before, key.split("."), value)}
            recipe = replace(recipe, **change)
        return recipe

    def fitted(self) -> Recipe:
        """Return the recipe with what follows from its data or its model: the vocabulary of token shards, or the
        tokenizer of a model's folder where the data are texts."""
        name, folder = str(self.data["name"]), Path(str(self.model["name"]))
        if name in _OF_TEXTS and folder.is_absolute() and any(folder.glob("tokenizer*")):
            return replace(self, data={"tokenizer": str(folder), **self.data})
        if name != "tokens" and not Path(name).is_absolute():
            return self
        fitted: Recipe = feature("token-recipe")(self)
        return fitted

    def check(self) -> None:
        """Raise for import paths that do not exist; makes the user's modules importable in this process."""
        extend_path(self.paths)
        loss = self.loss if isinstance(self.loss, str) else self.loss["name"]
        parts = [("model", self.model["name"]), ("data", self.data["name"]), ("loss", loss)]
        parts += [("augment", self.augment.get("name", "")), ("optimizer", self.optimizer)]
        parts += [*((f"metrics.{name}", path) for name, path in self.metrics.items())]
        options = {} if isinstance(self.loss, str) else self.loss
        parts += [(f"loss.{name}", value) for name, value in options.items() if name != "name"]
        for part, path in [*parts, *(("callbacks", path) for path in self.callbacks)]:
            if isinstance(path, str) and is_import_path(path):
                check_import(path, part)


def from_document(document: Mapping[str, Any], name: str, folder: Path | None = None) -> Recipe:
    """Make a recipe from what a file or a function of the user holds; `folder`: where its file is."""
    allowed = [item.name for item in fields(Recipe) if item.name not in ("paths", "sized", "source")]
    for key in document:
        if key not in allowed:
            raise UsageError(
                f"the recipe '{name}': {unknown_name('key', key, allowed)}", hint="Settings belong in [settings]."
            )
    base = folder or Path.cwd()
    values = {key: value for key, value in document.items() if key not in (*_PARTS, "name", "summary")}
    values |= {part: _part(document.get(part), part, name, base) for part in _PARTS}
    if isinstance(values.get("loss"), Mapping):
        values["loss"] = _part(values["loss"], "loss", name, base)
    for key in ("settings", "gpu_settings", "sample", "metrics", "augment"):
        if not isinstance(values.get(key, {}), Mapping):
            raise UsageError(f"the recipe '{name}': {key} is {values[key]!r}, expected a table of values")
    for key in ("loss", "optimizer"):
        if callable(values.get(key)):
            values[key] = import_path_of(values[key], key)
    if isinstance(values.get("callbacks"), str):
        values["callbacks"] = [values["callbacks"]]
    for key in ("presets", "callbacks"):
        if not isinstance(values.get(key, ()), Sequence):
            raise UsageError(f"the recipe '{name}': {key} is {values[key]!r}, expected a list")
        values[key] = tuple(import_path_of(v, key) if callable(v) else str(v) for v in values.get(key, ()))
    metrics: Mapping[str, Any] = values.get("metrics", {})
    values["metrics"] = {k: import_path_of(v, f"metrics.{k}") if callable(v) else str(v) for k, v in metrics.items()}
    paths = tuple(dict.fromkeys(str(item) for item in (base.resolve(), Path.cwd())))
    return Recipe(str(document.get("name", name)), str(document.get("summary", "")), **values, paths=paths)


def _part(entry: Any, part: str, name: str, base: Path) -> dict[str, Any]:
    """Return a recipe's model or data as a table with a `name`."""
    table = dict(entry) if isinstance(entry, Mapping) else {} if entry is None else {"name": entry}
    value = table.get("name")
    if callable(value):
        value = import_path_of(value, part)
    if not isinstance(value, str) or not value:
        raise UsageError(f"the recipe '{name}' does not say which {part} it has", hint=_HINTS[part])
    return {**table, "name": _located(value, base, part)}


def _located(name: str, base: Path, part: str = "model") -> str:
    """Return a path of files, or of a repository of the Hub, as an absolute one; other names as they are."""
    if name.startswith("hf://"):
        return str(feature("hub")(name, part))
    is_path = name.startswith((".", "~")) or "/" in name or (not is_import_path(name) and (base / name).is_file())
    return str((base / Path(name).expanduser()).resolve()) if is_path else name


def _with_nested(table: Mapping[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    if len(keys) == 1:
        return {**table, keys[0]: value}
    inner = table.get(keys[0], {})
    return {**table, keys[0]: _with_nested(inner if isinstance(inner, Mapping) else {}, keys[1:], value)}


def read_changes(words: Sequence[str], settings: Callable[[str], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `--set KEY=VALUE` words into settings and nested values of a recipe; values are read as TOML, else text."""
    of_run: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    if words:
        import tomllib  # 5 ms, which help and completion do not need
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {word}: expected KEY=VALUE", hint="Write --set model.dropout=0.1")
        key = key.strip().replace("-", "_")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text  # a plain word needs no quotes
        plain = key.removeprefix("settings.")
        if settings(plain):
            of_run[plain] = value
        elif "." not in plain:
            close = nearest(plain, TABLES)
            raise UsageError(
                f"--set {word}: '{plain}' is not a setting{f'; did you mean {close}.<name>?' if close else ''}",
                hint="Write --set model.NAME=..., --set data.NAME=..., or a setting of `phalanx config show`.",
            )
        else:
            nested[key] = value
    return of_run, nested


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
            f"'{name}' is a script, not a recipe", hint=f"To run your own script: phalanx train --script {name}"
        )
    hint = ""
    if file := next((f"{name}{ending}" for ending in _ENDINGS if Path(f"{name}{ending}").is_file()), ""):
        raise UsageError(f"unknown recipe '{name}'. Did you mean the file {file}?", hint=f"Write: phalanx train {file}")
    if "." in name:
        module, _, last = name.rpartition(".")
        hint = f"To train your own model: phalanx train --model {module}:{last} --data {module}:load_data\n  "
        hint += f"To run your own module: phalanx train -m {name}"
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
    provided = load_entry_point(GROUP, name)
    return None if provided is None else replace(as_recipe(provided, name), source=name)


def _installed() -> list[str]:
    from importlib.metadata import entry_points  # 30 ms to import

    return list(entry_points(group=GROUP).names)


def as_recipe(source: Any, name: str) -> Recipe:
    """Return the recipe that a module of the user holds: a Recipe, a dict, a path, or a function that returns one."""
    try:
        content = source() if callable(source) else source
    except Exception as error:  # it is code of the user
        raise UsageError(f"the recipe '{name}' raised {type(error).__name__}: {error}") from error
    if isinstance(content, Recipe):
        return content
    if isinstance(content, (str, Path)):
        return read_recipe(Path(content))
    if not isinstance(content, Mapping):
        raise UsageError(
            f"'{name}' is {a_type(content)}, not a recipe",
            hint='Return a dict: {"model": ..., "data": ..., "settings": {...}}.',
        )
    return from_document(content, name.rpartition(":")[2])


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a TOML or YAML file; its folder is where modules and data of the user are found."""
    from phalanx.config.sources import read_document  # ranks, which get the recipe itself, read no file

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
    tables = [table for table in document if table != "summary"]
    nested = {f"{table}.{key}": value for table in tables for key, value in _table(document, table, path).items()}
    summary = str(document.get("summary", base.summary))
    return replace(base.with_values(nested), summary=summary, source=str(path.resolve()))


def _table(document: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = document[name]
    if isinstance(table, Mapping):
        return table
    raise UsageError(f"{path}: {name} = {table!r} next to 'recipe': expected a table such as [settings] or [model]")
