"""Reference models. Nothing heavy is imported until used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.models.convnet import ConvNet
    from phalanx.models.gpt import GPT, GPTConfig
    from phalanx.models.mlp import MLP
    from phalanx.models.registry import build, names

__all__ = ["GPT", "MLP", "ConvNet", "GPTConfig", "build", "names"]

_HOMES = {
    "GPT": "gpt",
    "GPTConfig": "gpt",
    "MLP": "mlp",
    "ConvNet": "convnet",
    "build": "registry",
    "names": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
