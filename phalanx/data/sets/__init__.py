"""The built-in data sets by name."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from phalanx.errors import UsageError, unknown_name

# Module and function, imported when asked for: listing names must not import torch.
_DATASETS = {
    "digits": ("phalanx.data.sets.digits", "digits"),
    "imagefolder": ("phalanx.data.sets.imagefolder", "imagefolder"),
    "mnist": ("phalanx.data.sets.mnist", "mnist"),
    "synthetic": ("phalanx.data.sets.synthetic", "synthetic"),
    "text": ("phalanx.data.sets.text", "text"),
}

_SPLITS = ("train", "val")


def names() -> list[str]:
    """Return the names that `load` knows."""
    return sorted(_DATASETS)


def load(name: str, split: str = "train", **options: Any) -> Any:
    """Return the data set `name`: `split` is "train" or "val", the options are those of the data set's own function."""
    if name not in _DATASETS:
        raise UsageError(unknown_name("data set", name, _DATASETS))
    if split not in _SPLITS:
        raise UsageError(unknown_name("split", split, _SPLITS))
    module, function = _DATASETS[name]
    make = getattr(importlib.import_module(module), function)
    allowed = [option for option in inspect.signature(make).parameters if option != "split"]
    for option in options:
        if option not in allowed:
            if not allowed:
                raise UsageError(f"the data set '{name}' has no options; got {option}", hint=f"Write: load({name!r})")
            raise UsageError(unknown_name(f"option of data set '{name}'", option, allowed))
    return make(split=split, **options)
