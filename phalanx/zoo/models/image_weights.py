"""Weights that torchvision and timm publish for ResNet and ViT, under the names of our models."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import CheckpointError
from phalanx.zoo.models.hf.model_folder import SINGLE, read_json
from phalanx.zoo.models.resnet import ResNet, ResNetConfig
from phalanx.zoo.models.vit import ViT, ViTConfig

_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")


def timm_file(folder: Path, config: str) -> Path | None:
    """Return the file of weights in a folder of timm, as it has them on the Hub; None for another folder."""
    document = read_json(folder / config)
    return folder / SINGLE if "architecture" in document and "model_type" not in document else None


def timm_note(folder: Path, config: str) -> str:
    """Return how the images of a model of timm were normalised, which the weights count on."""
    described = read_json(folder / config).get("pretrained_cfg") or {}
    values = {name: ",".join(map(str, described[name])) for name in ("mean", "std") if described.get(name)}
    flags = " ".join(f"--set 'augment.{name}=[{numbers}]'" for name, numbers in values.items())
    return f"; its images were normalised by: {flags}" if flags else ""


def own_names(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights of torchvision's or timm's model of the same shape by our names; others as they are.

    A file of training is opened: its weights are under "state_dict" or "model".
    """
    state = next((state[key] for key in _NESTED if isinstance(state.get(key), Mapping)), state)
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    if isinstance(model, ResNet) and "layer1.0.conv1.weight" in state:
        renamed = {_resnet_name(name, model.config): tensor for name, tensor in state.items()}
    elif isinstance(model, ViT) and "patch_embed.proj.weight" in state:
        renamed = {_vit_name(name): _vit_tensor(name, tensor, model.config) for name, tensor in state.items()}
    else:
        return state
    known = model.state_dict()
    strange = [name for name in renamed if name not in known and not name.startswith("head.")]
    if strange:
        raise CheckpointError(
            f"the weights are of another architecture than {type(model).__name__}: they have '{strange[0]}'"
            + (f" and {len(strange) - 1} more tensors that it does not have" if len(strange) > 1 else "")
        )
    return renamed


_RESNET_PART = re.compile(r"layer(\d)\.(\d+)\.(conv|bn)(\d)\.(.*)")
_RESNET_SHORTCUT = re.compile(r"layer(\d)\.(\d+)\.downsample\.(\d)\.(.*)")
_CONV_OR_NORM = {"conv": "conv", "bn": "norm", "0": "conv", "1": "norm"}


def _resnet_name(name: str, config: ResNetConfig) -> str:
    def block(match: re.Match[str]) -> int:
        return sum(config.depths[: int(match[1]) - 1]) + int(match[2])

    if part := _RESNET_PART.fullmatch(name):
        return f"layers.{block(part)}.parts.{int(part[4]) - 1}.{_CONV_OR_NORM[part[3]]}.{part[5]}"
    if part := _RESNET_SHORTCUT.fullmatch(name):
        return f"layers.{block(part)}.shortcut.{_CONV_OR_NORM[part[3]]}.{part[4]}"
    for theirs, ours in (("conv1.", "embed.conv."), ("bn1.", "embed.norm."), ("fc.", "head.")):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


_VIT_NAMES = (
    ("patch_embed.proj.", "embed.patch."),
    ("cls_token", "embed.label"),
    ("pos_embed", "embed.positions"),
    ("blocks.", "layers."),
    (".norm1.", ".attention_norm."),
    (".attn.qkv.", ".attention.qkv."),
    (".attn.proj.", ".attention.project."),
    (".norm2.", ".feed_norm."),
    (".mlp.fc1.", ".feed.expand."),
    (".mlp.fc2.", ".feed.project."),
)


def _vit_name(name: str) -> str:
    for theirs, ours in _VIT_NAMES:
        name = name.replace(theirs, ours)
    return name


def _vit_tensor(name: str, tensor: Tensor, config: ViTConfig) -> Tensor:
    if ".attn.qkv." in name:  # rows (3, heads, head width) become (heads, 3, head width)
        rows: Tensor = tensor.unflatten(0, (3, config.heads, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
        return rows.flatten(0, 2).contiguous()
    if name == "pos_embed" and tensor.shape[1] != config.patches + 1:
        return _resampled(tensor, config.patches)
    return tensor


def _resampled(positions: Tensor, patches: int) -> Tensor:
    """Return the positions of images of another size: those of the patches are interpolated, as timm does."""
    label, of_patches = positions[:, :1], positions[:, 1:]
    before, after = math.isqrt(of_patches.shape[1]), math.isqrt(patches)
    if before**2 != of_patches.shape[1]:
        raise CheckpointError(
            f"the weights are of another architecture than ViT: {positions.shape[1]} positions are not those of a "
            "class token and a square of patches"
        )
    grid = of_patches.float().reshape(1, before, before, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(after, after), mode="bicubic", antialias=True)
    return torch.cat([label, grid.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)], dim=1)
