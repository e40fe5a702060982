"""Reference models. Nothing heavy is imported until used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.zoo.models.attention import InnerAttention
    from phalanx.zoo.models.gpt import GPT, GPTConfig
    from phalanx.zoo.models.hf import load_pretrained, save_pretrained
    from phalanx.zoo.models.llama import Llama, LlamaConfig
    from phalanx.zoo.models.loss import LMOutput
    from phalanx.zoo.models.moe import MoE, MoEConfig
    from phalanx.zoo.models.registry import build, names, presets
    from phalanx.zoo.models.resnet import ResNet, ResNetConfig
    from phalanx.zoo.models.small import MLP, ConvNet
    from phalanx.zoo.models.vit import ViT, ViTConfig

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

_NAMES = {
    ".attention": "InnerAttention",
    ".gpt": "GPT GPTConfig",
    ".hf": "load_pretrained save_pretrained",
    ".llama": "Llama LlamaConfig",
    ".loss": "LMOutput",
    ".moe": "MoE MoEConfig",
    ".registry": "build names presets",
    ".resnet": "ResNet ResNetConfig",
    ".small": "MLP ConvNet",
    ".vit": "ViT ViTConfig",
}
__getattr__ = lazy_names(__name__, _NAMES)
