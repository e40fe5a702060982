"""Adapters in PEFT's layout, adapter_config.json and adapter_model.safetensors: PEFT and Phalanx read each other's."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx.errors import CheckpointError, ModelError, nearest
from phalanx.zoo.models.hf.model_folder import read_json
from phalanx.zoo.models.lora import Adapter, adapters, add_adapters, is_transposed, linear_layers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
_NOT_READ = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "use_qalora",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)
"""Settings of PEFT that change what an adapter computes and are not supported."""


def save_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a model's adapters in PEFT's format. If the model is sharded over ranks, all ranks must call this."""
    by_layer = adapters(model)
    if not by_layer:
        raise ModelError(f"{type(model).__name__} has no adapters to save.", hint="phalanx.lora(model) gives it some.")
    tensors = {
        f"{_PREFIX}{layer}{suffix}": _whole(getattr(adapter, side))
        for layer, adapter in by_layer.items()
        for side, suffix in _SUFFIXES.items()
    }
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path / f".{WEIGHTS}", {"format": "pt"})
        (path / f".{CONFIG}").write_text(json.dumps(_config(model, by_layer), indent=2) + "\n", encoding="utf-8")
        for name in (WEIGHTS, CONFIG):
            (path / f".{name}").replace(path / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' could not be written: {error}") from error


def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load adapters of PEFT or `save_adapter` into a model; a model without adapters gets them, and is frozen."""
    path = Path(folder)
    config = read_json(path / CONFIG)
    _check_config(config)
    pairs = _pairs(_read(path / WEIGHTS))
    _check_layers(model, pairs)
    shapes = {layer: (len(pair["A"]), _scale(config, layer, len(pair["A"]))) for layer, pair in pairs.items()}
    present = adapters(model)
    if not present:
        add_adapters(model, shapes, dropout=float(config.get("lora_dropout") or 0.0))
        present = adapters(model)
    elif present.keys() != pairs.keys():
        other = sorted(present.keys() ^ pairs.keys())[0]
        raise ModelError(f"the model's adapters are on other layers than those in '{path}': '{other}' is the first.")
    for layer, adapter in present.items():
        _fill(layer, adapter, pairs[layer], shapes[layer][1])


def _whole(parameter: Any) -> Tensor:
    if parameter.is_meta:
        raise ModelError("the adapters are on the meta device: they have shapes, but no values.")
    tensor: Tensor = parameter.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.cpu().contiguous()


def _config(model: nn.Module, by_layer: Mapping[str, Adapter]) -> dict[str, Any]:
    first = next(iter(by_layer.values()))
    ranks = {layer: adapter.rank for layer, adapter in by_layer.items()}
    alphas = {layer: adapter.scale * adapter.rank for layer, adapter in by_layer.items()}
    alpha = alphas[next(iter(by_layer))]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None) or None,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": first.dropout.p,
        "target_modules": _target_names(model, list(by_layer)),
        "fan_in_fan_out": is_transposed(model.get_submodule(next(iter(by_layer)))),
        "bias": "none",
        "use_rslora": False,
        "rank_pattern": {re.escape(layer): rank for layer, rank in ranks.items() if rank != first.rank},
        "alpha_pattern": {re.escape(layer): value for layer, value in alphas.items() if value != alpha},
    }


def _target_names(model: nn.Module, layers: list[str]) -> list[str]:
    """Return the last parts of names, or whole names where the last parts would match other layers too."""
    last_parts = sorted({layer.rpartition(".")[2] for layer in layers})
    meant = [name for name in linear_layers(model) if name.rpartition(".")[2] in last_parts]
    return last_parts if sorted(meant) == sorted(layers) else layers


def _check_config(config: Mapping[str, Any]) -> None:
    kind = str(config.get("peft_type"))
    if kind != "LORA":
        raise ModelError(f"{CONFIG}: peft_type is {kind}, and only LORA is read.")
    for name in _NOT_READ:
        if config.get(name):
            raise ModelError(f"{CONFIG}: {name} = {config[name]!r} is not supported.")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{CONFIG}: bias = {config['bias']!r} is not supported, adapters without biases are.")


def _read(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise CheckpointError(
            f"there is no {path.name} in '{path.parent}'.", hint="Pickle files (.bin) are not read: they can run code."
        )
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"'{path}' is damaged or not a safetensors file: {error}") from error
    return tensors


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return A and B by layer."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        side = next((side for side, suffix in _SUFFIXES.items() if name.endswith(suffix)), None)
        if side is None or not name.startswith(_PREFIX):
            raise ModelError(f"'{name}' in {WEIGHTS} is not a matrix of a linear layer's adapter.")
        layer = name.removeprefix(_PREFIX).removesuffix(_SUFFIXES[side])
        pairs.setdefault(layer, {})[side] = tensor
    for layer, pair in pairs.items():
        if len(pair) < 2:
            raise ModelError(f"{WEIGHTS} has only one of the two matrices of '{layer}'.")
    return pairs


def _check_layers(model: nn.Module, pairs: Mapping[str, Mapping[str, Tensor]]) -> None:
    layers = linear_layers(model)
    for layer in pairs:
        if layer not in layers:
            close = nearest(layer, layers)
            raise ModelError(
                f"the adapter of '{layer}' has no linear layer of that name in {type(model).__name__}",
                hint=f"The nearest name there is '{close}'." if close else "Is it another model's adapter?",
            )


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    alpha = float(config["lora_alpha"])
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _fill(layer: str, adapter: Adapter, pair: Mapping[str, Tensor], scale: float) -> None:
    for side, tensor in pair.items():
        parameter: Any = getattr(adapter, side)
        if hasattr(parameter, "full_tensor") or parameter.is_meta or adapter.merged:
            raise ModelError(
                "adapters are loaded into a model that is whole, in memory and not merged",
                hint="Call load_adapter before the model is prepared or trained.",
            )
        if parameter.shape != tensor.shape:
            have, want = list(tensor.shape), list(parameter.shape)
            raise ModelError(f"{side} of '{layer}' is {have} in the file and {want} in the model.")
        with torch.no_grad():
            parameter.copy_(tensor)
    adapter.scale = scale
