"""The reference models by name."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from torch import nn

# Module and function, imported when asked for: listing names must not import torch.
_MODELS = {
    "convnet": ("phalanx.models.convnet", "ConvNet"),
    "gpt": ("phalanx.models.gpt", "gpt"),
    "llama": ("phalanx.models.llama", "llama"),
    "mlp": ("phalanx.models.mlp", "MLP"),
    "moe": ("phalanx.models.moe", "moe"),
    "resnet": ("phalanx.models.resnet", "resnet"),
    "vit": ("phalanx.models.vit", "vit"),
}


def names() -> list[str]:
    """Return the names that `build` knows."""
    return sorted(_MODELS)


def presets(name: str) -> dict[str, Any]:
    """Return the presets of a model by name, smallest first: `build(name, preset=...)`. Empty where it has none."""
    module, _ = _find(name)
    return dict(getattr(importlib.import_module(module), "PRESETS", {}))


def build(name: str, **options: Any) -> nn.Module:
    """Return a new model `name`; the options are a `preset` and its changes, or the model's own arguments."""
    module, function = _find(name)
    make = getattr(importlib.import_module(module), function)
    parameters = inspect.signature(make).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for option in options:
        if option not in parameters and not takes_any:
            raise UsageError(unknown_name(f"option of model '{name}'", option, parameters))
    model: nn.Module = make(**options)
    return model


def _find(name: str) -> tuple[str, str]:
    if name not in _MODELS:
        raise UsageError(unknown_name("model", name, _MODELS))
    return _MODELS[name]
