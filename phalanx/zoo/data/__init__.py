"""Data sets by name: built in, of the user's own modules, or files."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, unknown_name
from phalanx.recipes.imports import call_with, is_import_path, load_import
from phalanx.zoo.data.places import Root, absolute, find_places, is_pattern
from phalanx.zoo.hub import on_disk

# Module and function, imported when asked for: listing names must not import torch.
_DATASETS = {
    "chats": ("phalanx.zoo.data.chats", "chats"),
    "choices": ("phalanx.zoo.data.choices", "choices"),
    "digits": ("phalanx.zoo.data.images", "digits"),
    "files": ("phalanx.zoo.data.files", "files"),
    "imagefolder": ("phalanx.zoo.data.imagefolder", "imagefolder"),
    "masked": ("phalanx.zoo.data.masked", "masked"),
    "mnist": ("phalanx.zoo.data.images", "mnist"),
    "pairs": ("phalanx.zoo.data.pairs", "pairs"),
    "preferences": ("phalanx.zoo.data.preferences", "preferences"),
    "prompts": ("phalanx.zoo.data.prompts", "prompts"),
    "questions": ("phalanx.zoo.data.questions", "questions"),
    "ratings": ("phalanx.zoo.data.ratings", "ratings"),
    "shards": ("phalanx.zoo.data.shards", "shards"),
    "spans": ("phalanx.zoo.data.masked", "spans"),
    "synthetic": ("phalanx.zoo.data.synthetic", "synthetic"),
    "text": ("phalanx.zoo.data.files", "text"),
    "tokens": ("phalanx.zoo.data.tokens", "tokens"),
}

READERS = (
    *("chats", "choices", "files", "imagefolder", "masked", "mnist"),
    *("pairs", "preferences", "prompts", "questions", "ratings", "shards", "spans", "tokens"),
)
"""The data sets that are read from files: those with the option `root`."""
OF_FOLDERS = ("mnist", "tokens")
"""Those of them that read one folder, and no file."""
_SPLITS = ("train", "val")
_VALIDATION_NAMES = ("val", "validation", "valid", "test")


def names() -> list[str]:
    """Return the names that `load` knows."""
    return sorted(_DATASETS)


def load(name: str, split: str = "train", **options: Any) -> Any:
    """Return one split of a data set, "train" or "val".

    `name` is a built-in data set (its function's arguments are the options), an import path such as
    `my_package.data:load`, or the path of a file or folder (see `phalanx.zoo.data.files`).
    """
    if split not in _SPLITS:
        raise UsageError(unknown_name("split", split, _SPLITS))
    if is_import_path(name):
        return load_splits(name, **options)[_SPLITS.index(split)]
    check_name(name := on_disk(name, "data"))
    if name in _DATASETS:
        make, owner = _function(name), f"data set '{name}'"
    else:
        make, options, owner = _function(reader_of(name)), {"root": name, **options}, f"data '{name}'"
    return call_with(make, options, owner, split=split)


def check_name(name: str) -> None:
    """Refuse a name that is neither of a built-in data set, nor an import path, nor a path."""
    if is_import_path(name) or name in _DATASETS or Path(name).is_absolute() or Path(name).exists():
        return
    if Path(name).suffix or is_pattern(name):
        find_places(name)  # which names the nearest one
    raise UsageError(
        unknown_name("data set", name, _DATASETS),
        hint="Write your own data as package.module:function, or as the path of its files: ./my-data",
    )


def named_data(text: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's table of data with other data: a data set, an import path, or files.

    Files are read by the recipe's own data set (`table`), with its options, where that reads files. A path becomes
    absolute: ranks, and a later command, may run in another folder.
    """
    text, name = on_disk(text, "data"), str(table.get("name", ""))
    reads_files = name in READERS or Path(name).is_absolute()
    path = Path(text).expanduser()
    is_path = "/" in text or text.startswith((".", "~")) or is_pattern(text)
    is_known = text in _DATASETS and not (reads_files and path.exists())  # train mnist --data mnist
    if is_import_path(text) or is_known or not (is_path or reads_files or path.exists() or path.suffix):
        return {"name": text}
    location = absolute(text)
    if not reads_files:
        return {"name": location}
    return {**table, "name": location} if name not in READERS else {**table, "root": location}


def takes(name: str, option: str) -> bool:
    """Whether a built-in data set, or the one that reads a path, has an option."""
    if is_import_path(name):
        return False
    kind = name if name in _DATASETS else reader_of(name)
    return option in inspect.signature(_function(kind)).parameters


_HEAD = 1 << 16


def reader_of(root: Root) -> str:
    """Return the data set that reads a place: by its manifest, or by a word at the beginning of a JSON file."""
    from phalanx.zoo.token_data import read_token_manifest  # few runs read files

    path = Path(root if isinstance(root, str | Path) else root[0]).expanduser()
    if read_token_manifest(path) is not None:
        return "tokens"
    file = next(iter(sorted(path.glob("*.json"))), path) if path.is_dir() else path
    words = {".json": ("questions", b'"paragraphs"'), ".jsonl": ("choices", b'"endings"')}
    if file.is_file() and file.suffix in words:
        kind, word = words[file.suffix]
        with file.open("rb") as opened:
            if word in opened.read(_HEAD):
                return kind
    return "files"


def load_splits(name: str, **options: Any) -> tuple[Any, Any]:
    """Return the data for training and for validation (None where there is none).

    What classes and columns mean is learned from the training data, and holds for the others.

    A function of the user takes `split` and is called twice, or returns both: a pair, or a dict with "train" and "val".
    """
    if not is_import_path(name):
        train = load(name, "train", **options)
        return train, load(name, "val", **{**learned_from(train, name), **options})
    make, owner = load_import(name, "data"), f"data '{name}'"
    if "split" in inspect.signature(make).parameters:
        return call_with(make, options, owner, split="train"), call_with(make, options, owner, split="val")
    content = call_with(make, options, owner)
    if isinstance(content, Mapping) and "train" in content:
        return content["train"], next((content[key] for key in _VALIDATION_NAMES if key in content), None)
    if isinstance(content, tuple):
        if len(content) != 2:
            raise UsageError(f"{owner} returns a tuple of {len(content)}; expected (training data, validation data)")
        return content
    return content, None


def learned_from(train: Any, name: str) -> dict[str, Any]:
    """Return the options by which a data set reads other files as it has read the training files."""
    options: dict[str, Any] = dict(getattr(inner_of(train), "columns", {}))
    if classes := getattr(train, "classes", None):
        options["class_names"] = classes
    return {option: value for option, value in options.items() if takes(name, option)}


def inner_of(data: Any) -> Any:
    """Return the data set of which data are a part."""
    while hasattr(data, "dataset") and hasattr(data, "indices"):
        data = data.dataset
    return data


def load_given(name: str, **options: Any) -> Any:
    """Return the data that a trained model is asked about: the validation part where there is one, else all of it."""
    if is_import_path(name):
        train, val = load_splits(name, **options)
        return train if val is None else val
    if takes(name, "val_fraction"):
        options = {"val_fraction": 1.0, **options}
    return load(name, "val", **options)


def maker(name: str) -> Any:
    """Return the function that makes a data set: its arguments are the options."""
    if is_import_path(name):
        return load_import(name, "data")
    check_name(name)
    return _function(name if name in _DATASETS else reader_of(name))


def _function(name: str) -> Any:
    module, function = _DATASETS[name]
    return getattr(importlib.import_module(module), function)
