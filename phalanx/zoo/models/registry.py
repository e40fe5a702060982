"""The reference models by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError, a_type, unknown_name
from phalanx.recipes.imports import call_with, is_import_path, load_import
from phalanx.zoo.hub import on_disk

if TYPE_CHECKING:
    from torch import nn

# Module and function, imported when asked for: listing names must not import torch.
_MODELS = {
    "bert": ("phalanx.zoo.models.bert", "bert"),
    "convnet": ("phalanx.zoo.models.small", "ConvNet"),
    "gpt": ("phalanx.zoo.models.gpt", "gpt"),
    "llama": ("phalanx.zoo.models.llama", "llama"),
    "mlp": ("phalanx.zoo.models.small", "MLP"),
    "moe": ("phalanx.zoo.models.moe", "moe"),
    "resnet": ("phalanx.zoo.models.resnet", "resnet"),
    "t5": ("phalanx.zoo.models.t5", "t5"),
    "vit": ("phalanx.zoo.models.vit", "vit"),
}


def names() -> list[str]:
    """Return the names that `build` knows."""
    return sorted(_MODELS)


def module_of(name: str) -> str:
    """Return the module of a reference model."""
    return _find(name)[0]


def presets(name: str) -> dict[str, Any]:
    """Return the presets of a model by name, smallest first: `build(name, preset=...)`. Empty where it has none."""
    module, _ = _find(name)
    return dict(getattr(importlib.import_module(module), "PRESETS", {}))


def build(name: str, **options: Any) -> nn.Module:
    """Return a new model.

    `name` is that of a reference model (options: a `preset` and its changes, or the model's own arguments), an import
    path such as `my_package.nets:Net` with the options of that class or function, or the folder of a Hugging Face
    model.
    """
    make = maker(name := on_disk(name))
    if is_import_path(name):
        return _checked(call_with(make, options, f"model '{name}'"), name)
    if _is_path(name):
        return make(Path(name), **options)
    model: nn.Module = call_with(make, options, f"model '{name}'")
    return model


def check_name(name: str) -> None:
    """Refuse a name that is neither of a reference model, nor an import path, nor a path."""
    if not is_import_path(name) and not _is_path(name):
        _find(name)


def maker(name: str) -> Callable[..., nn.Module]:
    """Return the function or class that makes a model: its arguments are the options."""
    if is_import_path(name):
        make = load_import(name, "model")
    elif _is_path(name):
        from phalanx.zoo.models.hf import from_folder as make
    else:
        module, function = _find(name)
        make = getattr(importlib.import_module(module), function)
    return make  # type: ignore[no-any-return]


def build_options(name: str) -> list[str]:
    """Return the names of a model's options; empty for the folder of a Hugging Face model."""
    if _is_path(name):
        return []
    options = list(inspect.signature(maker(name)).parameters)
    if is_import_path(name):
        return options
    sizes = list(presets(name).values())  # what a preset sets can be changed
    return options + [field.name for field in dataclasses.fields(sizes[0])] if sizes else options


def longest_input(model: Any) -> int:
    """Return how many tokens a model takes at once; of one that does not say it, more than any text has."""
    config = getattr(model, "config", None)
    return getattr(config, "seq_len", None) or getattr(config, "max_position_embeddings", None) or sys.maxsize


def _checked(model: Any, name: str) -> nn.Module:
    from torch import nn

    if isinstance(model, nn.Module):
        return model
    raise UsageError(f"model = '{name}' gives {a_type(model)}, not a torch.nn.Module")


def _is_path(name: str) -> bool:
    return Path(name).is_absolute() or (name not in _MODELS and Path(name).exists())


def _find(name: str) -> tuple[str, str]:
    if name not in _MODELS:
        raise UsageError(
            unknown_name("model", name, _MODELS),
            hint="Write your own model as package.module:Class, or as the path of its folder: ./my-model",
        )
    return _MODELS[name]
