"""Reference models. Nothing heavy is imported until used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.models.attention import InnerAttention
    from phalanx.models.gpt import GPT, GPTConfig
    from phalanx.models.hf import load_pretrained, save_pretrained
    from phalanx.models.llama import Llama, LlamaConfig
    from phalanx.models.loss import LMOutput
    from phalanx.models.moe import MoE, MoEConfig
    from phalanx.models.registry import build, names, presets
    from phalanx.models.resnet import ResNet, ResNetConfig
    from phalanx.models.small import MLP, ConvNet
    from phalanx.models.vit import ViT, ViTConfig

_HOMES = {
    "ConvNet": "small",
    "GPT": "gpt",
    "GPTConfig": "gpt",
    "InnerAttention": "attention",
    "LMOutput": "loss",
    "Llama": "llama",
    "LlamaConfig": "llama",
    "MLP": "small",
    "MoE": "moe",
    "MoEConfig": "moe",
    "ResNet": "resnet",
    "ResNetConfig": "resnet",
    "ViT": "vit",
    "ViTConfig": "vit",
    "build": "registry",
    "load_pretrained": "hf",
    "names": "registry",
    "presets": "registry",
    "save_pretrained": "hf",
}
__all__ = [
    "GPT",
    "MLP",
    "ConvNet",
    "GPTConfig",
    "InnerAttention",
    "LMOutput",
    "Llama",
    "LlamaConfig",
    "MoE",
    "MoEConfig",
    "ResNet",
    "ResNetConfig",
    "ViT",
    "ViTConfig",
    "build",
    "load_pretrained",
    "names",
    "presets",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
