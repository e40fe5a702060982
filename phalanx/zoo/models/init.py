"""Initial weights and presets of the reference models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from phalanx.errors import UsageError, unknown_name
from phalanx.recipes.imports import check_number, unknown_option

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)


def is_meta(module: nn.Module) -> bool:
    """Whether a module was built under `torch.device("meta")` and has no memory yet."""
    return any(parameter.is_meta for parameter in module.parameters())


def init_transformer(model: nn.Module, *, layers: int, residual: Sequence[str], std: float = 0.02) -> None:
    """Draw N(0, std) for matrices, narrower for those named in `residual`; zero biases; norms to one.

    Each of the `layers` adds two residual outputs to the stream, so these are divided by sqrt(2 x layers):
    the stream then keeps its variance at any depth.
    """
    narrow = std / math.sqrt(2 * layers)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(module.weight, std=narrow if name.rpartition(".")[2] in residual else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.reset_parameters()


def from_preset(model: str, presets: Mapping[str, Config], preset: str, changes: Mapping[str, Any]) -> Config:
    """Return the config `preset` of a model with some of its fields changed."""
    if preset not in presets:
        raise UsageError(unknown_name("preset", preset, presets, of=f"model '{model}'"))
    fields = {field.name: field.type for field in dataclasses.fields(presets[preset])}
    for change in changes:
        if change not in fields:
            raise unknown_option(f"model '{model}'", change, ["preset", *fields])
        check_number(f"model '{model}'", change, changes[change], fields[change])
    return dataclasses.replace(presets[preset], **changes)
