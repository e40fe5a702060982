"""The data that a trained model is asked about: those of its run, or others, which are read as those were.

evaluate, predict and export, and the methods of `SavedRun`, find data here and nowhere else: the run's own options
(the size of images, columns, classes, tokenizer) hold for any files that are named; what is given replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.recipes import Recipe
from phalanx.zoo.data import READERS, check_name, named_data, reader_of, takes
from phalanx.zoo.data.image_files import IMAGE_ENDINGS
from phalanx.zoo.data.places import Root, absolute, find_files
from phalanx.zoo.pretrained import tokenizer_of, with_tokenizer

Given = str | Path | Sequence[str | Path]
_OF_PLACES = ("name", "root", "sources", "val_fraction")
"""Options that say which samples, not how they are read."""


def given_table(
    recipe: Recipe, source: Given, learned: Mapping[str, Any], changes: Mapping[str, Any], *, needs_target: bool
) -> dict[str, Any]:
    """Return a recipe's table of data for what is named: a data set, an import path, or one or several files.

    `learned`: what a checkpoint keeps of the training data: the names of columns and classes. `changes`: options that
    are given, which win over those of the run.
    """
    options = {name: value for name, value in recipe.data.items() if name not in _OF_PLACES}
    if isinstance(source, str | Path):
        named = named_data(str(source), recipe.data)
        location = named.get("root") or named["name"]
        if "root" not in named and not Path(location).is_absolute():
            check_name(location)
            return {"name": location, **changes}
    else:
        location = [absolute(path) for path in source]
    find_files(location)  # a wrong path is refused before anything is built
    reader = _reader(recipe, location)
    sizes = {"size": recipe.model.get("image_size"), "channels": recipe.model.get("channels")}
    if "text" in changes:  # another column of texts
        learned = {name: value for name, value in learned.items() if name != "inputs"}
    all_options = {**{name: value for name, value in sizes.items() if value is not None}, **options, **learned}
    table = {"name": reader, "root": location, **{n: value for n, value in all_options.items() if takes(reader, n)}}
    table = with_tokenizer(table, tokenizer_of(recipe)) if recipe.data else table
    if takes(reader, "needs_target"):
        table["needs_target"] = needs_target
    return {**table, **changes}


def check_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of data that --set gives for a trained model; its other parts are what they are."""
    for path in changes:
        table, _, name = path.partition(".")
        if table != "data" or not name:
            raise UsageError(
                f"--set {path}: a trained model keeps its {table or 'parts'}; options of data can be set",
                hint="Write: --set data.size=64, or --set data.target=NAME",
            )
    return {path.partition(".")[2]: value for path, value in changes.items()}


def _reader(recipe: Recipe, location: Root) -> str:
    """Return the data set that reads a place: one that its files name, that of the run, or any files."""
    kind, name = reader_of(location), str(recipe.data.get("name", ""))
    if kind != "files":
        return kind
    if Path(name).is_absolute():
        name = "files"
    images = any(file.suffix.lower() in IMAGE_ENDINGS for file in find_files(location).files)
    if name not in READERS or name in ("tokens", "choices") or (name == "mnist" and images):
        return "files"
    return name
