"""The parts that a recipe describes: its model and its data, each as the other needs it.

For training the data tell sizes of the model; the recipe that is kept with the run has them, so that a trained model is
built without its training data, and other data are read as those were.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from phalanx.errors import UsageError
from phalanx.model import WrapsModel, implements
from phalanx.recipes import Recipe
from phalanx.recipes.imports import call_with, check_number, extend_path, is_import_path, load_import
from phalanx.zoo.data import inner_of, load_given, load_splits, takes
from phalanx.zoo.models.registry import build, build_options, longest_input, names

_LONGEST_TEXT = 1024
"""Longer windows of a corpus of some megabytes would be few."""
_LONGEST_OF_FOLDER = 128
"""For the model of a folder, whose limit may be far above what its texts need."""


class RecipeParts(NamedTuple):
    """A model, its data, and the recipe with the sizes that the model has taken from them."""

    model: nn.Module
    train: Any
    val: Any
    recipe: Recipe


def recipe_parts(recipe: Recipe, *, without_storage: bool = False) -> RecipeParts:
    """Return a recipe's model and its data for training and validation; `without_storage`: a model on "meta".

    A loss that is a module around the model (`models.contract.WrapsModel`) is a part of it.
    """
    return _parts(recipe, _both_splits, without_storage)


def given_parts(recipe: Recipe) -> tuple[nn.Module, Any]:
    """Return a recipe's model, and its data as those that a trained model is asked about."""
    parts = _parts(recipe, lambda table: (None, load_given(table["name"], **_options(table))), False)
    return parts.model, parts.val


def recipe_model(recipe: Recipe) -> nn.Module:
    """Return the model of a run's recipe; its data are read only if the run ended before their sizes were known."""
    if not recipe.sized:
        return recipe_parts(recipe).model
    extend_path(recipe.paths)
    model = dict(recipe.model)
    name = model.pop("name")
    built: Any = _maker(name, model, weights=False)(name, **model)
    from phalanx.zoo.pretrained import tokenizer_of

    if (tokenizer := tokenizer_of(recipe)) and not hasattr(built, "name_or_path"):
        built.name_or_path = tokenizer  # where `export` finds it
    return _inside_loss(recipe, built)


def given_data(table: Mapping[str, Any], model: nn.Module) -> Any:
    """Return data that a trained model is asked about, as it takes them; `table`: as that of a recipe."""
    table = dict(table)
    bare: Any = model.trained_model() if implements(model, WrapsModel) else model
    if takes(str(table["name"]), "seq_len") and table.get("seq_len", "model") == "model":
        longest = longest_input(bare)
        if longest < sys.maxsize:
            table["seq_len"] = min(longest, _LONGEST_TEXT)
    data = load_given(table["name"], **_options(table))
    _fit(bare, data, None)
    _compare_tokenizers(bare, data, table)
    return data


def loss_options(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """Return the name of a recipe's loss, and its options."""
    table = {"name": recipe.loss} if isinstance(recipe.loss, str) else recipe.loss
    return table["name"], {key: value for key, value in table.items() if key != "name"}


def _parts(recipe: Recipe, load: Callable[[dict[str, Any]], tuple[Any, Any]], without_storage: bool) -> RecipeParts:
    extend_path(recipe.paths)
    recipe = recipe.fitted()
    device = torch.device("meta") if without_storage else nullcontext()
    data, model = dict(recipe.data), dict(recipe.model)
    name = model.pop("name")
    are_files, is_folder = (Path(str(entry)).is_absolute() for entry in (data["name"], name))
    if (are_files or data["name"] == "tokens") and "seq_len" in build_options(name):
        data.setdefault("seq_len", "model")
    make = _maker(name, model, weights=not without_storage)
    if "pretrained" in model and name in names():
        from phalanx.zoo.pretrained import with_source_tokenizer  # few runs need it

        data = with_source_tokenizer(data, model["pretrained"])
    built: Any = None
    if data.get("seq_len") == "model":
        with device:
            built = make(name, **model)
        longest = longest_input(built)
        data["seq_len"] = longest if data["name"] == "tokens" else min(longest, _LONGEST_TEXT)
    elif are_files and is_folder and "seq_len" not in data and takes(str(data["name"]), "seq_len"):
        built = make(name, **model)
        data["seq_len"] = min(longest_input(built), _LONGEST_OF_FOLDER)
    train, val = load(data)
    learned = val if train is None else train
    sizes = _sizes(recipe, build_options(name), learned) if "pretrained" not in model else {}
    classes = _class_count(learned) if "classes" in build_options(name) else None
    if classes is not None and "classes" not in model:  # known only from the user's files
        model["classes"], built = classes, None
    if name in names():
        model = {**sizes, **model}
    if built is None:
        with device:
            built = make(name, **model)
    _fit(built, learned, None if train is None else val)
    _compare_tokenizers(built, learned, data)
    if (tokenizer := _tokenizer_place(learned, data)) and not hasattr(built, "name_or_path"):
        built.name_or_path = str(tokenizer)  # where `export` finds it
    data_table = {**recipe.data, **({"seq_len": data["seq_len"]} if "seq_len" in data else {})}
    sized = replace(recipe, data=data_table, model={"name": name, **model}, sized=True)
    return RecipeParts(_inside_loss(recipe, built), train, val, sized)


def _maker(name: str, model: Mapping[str, Any], *, weights: bool) -> Callable[..., nn.Module]:
    make = build
    if "pretrained" in model and name in names():
        from phalanx.zoo.pretrained import build_pretrained  # few runs need it

        make = partial(build_pretrained, weights=weights)
    return partial(_with_noise, make) if "neftune" in model else make


def _with_noise(make: Callable[..., nn.Module], name: str, *, neftune: Any, **options: Any) -> nn.Module:
    """Return a model whose embeddings get noise in training."""
    from phalanx.zoo.models.neftune import neftune as add_noise  # few runs need it

    check_number(f"model '{name}'", "neftune", neftune, float)
    return add_noise(make(name, **options), neftune)


def _inside_loss(recipe: Recipe, model: nn.Module) -> nn.Module:
    """Return a model, or the loss around it that is a module itself."""
    if not recipe.loss:
        return model
    name, options = loss_options(recipe)
    loss: Any = load_import(name, "loss") if is_import_path(name) else None
    if not implements(loss, WrapsModel):
        return model
    # A loss that turns tokens into texts does so as the data do.
    as_data = {key: recipe.data[key] for key in ("tokenizer", "template") if key in recipe.data}
    taken = inspect.signature(loss).parameters  # type: ignore[arg-type]  # a class
    options = {**{key: value for key, value in as_data.items() if key in taken}, **options}
    wrapped: nn.Module = call_with(loss, options, f"loss '{name}'", model=model)  # type: ignore[arg-type]
    return wrapped


def _class_count(train: Any) -> int | None:
    """Return how many classes data have, which names or a number of them tell."""
    classes = getattr(train, "classes", None)
    return classes if classes is None or isinstance(classes, int) else len(classes)


def _sizes(recipe: Recipe, options: list[str], data: Any) -> dict[str, int]:
    """Return the sizes of a model's ends that the first sample or the names of the classes tell."""
    sample = _first_sample(data) if {"in_features", "channels"} & {*options} else None
    sample = (sample,) if isinstance(sample, torch.Tensor) else sample
    if not isinstance(sample, (tuple, list)) or not isinstance(sample[0], torch.Tensor):
        return {}
    inputs, target = sample[0], sample[-1]
    if "in_features" in options:
        is_number = len(sample) > 1 and isinstance(target, torch.Tensor) and target.is_floating_point()
        ends = target.numel() if is_number else _class_count(data)
        return {"in_features": inputs.numel(), **({"out_features": ends} if ends else {})}
    if inputs.ndim != 3:
        return {}
    crop, is_square = recipe.augment.get("crop"), inputs.shape[1] == inputs.shape[2]
    sizes = {"channels": inputs.shape[0]}
    if isinstance(crop, int) or (is_square and not crop):  # a schedule of crops is for models that take any size
        sizes["image_size"] = crop or inputs.shape[2]
    return {name: size for name, size in sizes.items() if name in options}


def _first_sample(data: Any) -> Any:
    has_first = hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data)
    return data[0] if has_first else None


def _fit(model: nn.Module, train: Any, val: Any) -> None:
    """Let data that can do so give batches as the model takes them.

    Raise where a model has fewer tokens than its data, or cannot keep packed documents apart.
    """
    for data in (train, val):
        if hasattr(data, "fit_to"):
            data.fit_to(model)
    _check_tokens(model, train)
    vocabulary, needed = (getattr(part, "vocab_size", None) for part in (getattr(model, "config", None), train))
    if isinstance(vocabulary, int) and isinstance(needed, int) and vocabulary < needed:
        raise UsageError(
            f"the model knows {vocabulary} tokens, and the data have {needed}",
            hint=f"Write: --set model.vocab_size={needed}, or make the data with the model's own tokenizer.",
        )
    if getattr(train, "is_packed", False) and "documents" not in inspect.signature(model.forward).parameters:
        raise UsageError(
            f"packed documents need a model whose forward takes `documents`, and {type(model).__name__} does not",
            hint="Write: --set data.packing=windows (chats: none), or train gpt, llama or moe.",
        )


def _check_tokens(model: nn.Module, data: Any) -> None:
    """Refuse numbers or images for a model of tokens."""
    if not isinstance(getattr(getattr(model, "config", None), "vocab_size", None), int):
        return
    sample = _first_sample(data)
    inputs = sample[0] if isinstance(sample, (tuple, list)) else sample
    if not isinstance(inputs, torch.Tensor) or not inputs.is_floating_point():
        return
    columns = getattr(inner_of(data), "columns", {}).get("inputs", ())
    numbers = f"numbers (the columns {', '.join(columns)})" if columns else f"numbers of shape {list(inputs.shape)}"
    raise UsageError(
        f"{type(model).__name__} reads tokens, and the data hold {numbers}",
        hint="For rows of numbers write --model mlp, for images --model convnet; for a column of texts add "
        "--set data.text=NAME",
    )


def _compare_tokenizers(model: Any, train: Any, data: dict[str, Any]) -> None:
    """Raise where a folder's model, which has a tokenizer, would see bytes; note where it sees another one's tokens."""
    of_model = Path(str(getattr(model, "name_or_path", ""))) / "tokenizer.json"
    if not of_model.is_file() or not isinstance(getattr(train, "vocab_size", None), int):
        return
    of_data = _tokenizer_place(train, data)
    if of_data is None:
        raise UsageError(
            f"the texts are read as bytes, and the model in {of_model.parent} knows the tokens of its tokenizer",
            hint=f"Write: --set data.tokenizer={of_model.parent}",
        )
    other = Path(of_data) / "tokenizer.json" if Path(of_data).is_dir() else Path(of_data)
    if other.is_file() and other.read_bytes() != of_model.read_bytes():
        note = f"warning: the tokens are those of {other}, which differs from the model's own {of_model}"
        model.weights_note = f"{getattr(model, 'weights_note', '')} {note}".strip()


def _tokenizer_place(train: Any, data: dict[str, Any]) -> str | None:
    """Return the folder or file of the tokenizer that made the tokens of data; None for bytes, and other data."""
    if data["name"] == "tokens":
        return str(data.get("root") or data["sources"][0]["path"])
    tokenizer = getattr(train, "tokenizer", data.get("tokenizer"))
    return None if tokenizer is None else str(tokenizer)


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "name"}


def _both_splits(table: dict[str, Any]) -> tuple[Any, Any]:
    train, val = load_splits(table["name"], **_options(table))
    return train, None if val is not None and hasattr(val, "__len__") and not len(val) else val
