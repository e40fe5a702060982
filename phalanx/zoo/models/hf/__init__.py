"""Load and save Hugging Face checkpoints: GPT-2, Llama, BERT and T5 as our own classes, others by transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ModelError, UsageError, a_type, unknown_name
from phalanx.zoo.hub import HUB_HINT, on_disk
from phalanx.zoo.models.hf.encoders import BERT, T5_LAYOUT
from phalanx.zoo.models.hf.mapping import GPT2, LLAMA, HFMapping, TensorRule
from phalanx.zoo.models.hf.model_folder import (
    CONFIG,
    INDEX,
    SINGLE,
    find_tensors,
    read_json,
    read_shapes,
    read_tensors,
    write_folder,
)
from phalanx.zoo.models.lora import adapters

LAYOUTS = {layout.model_type: layout for layout in (GPT2, LLAMA, BERT, T5_LAYOUT)}
"""By the model_type of config.json."""


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json and safetensors files of at most `max_shard_bytes`, with an index when there are several.

    `state_dict`: for a model that is sharded over ranks, its full state dict; call this on one rank.
    """
    layout, config = _layout_of(model), model.config
    if any(not adapter.merged for adapter in adapters(model).values()):
        raise ModelError(
            f"this {type(model).__name__} has adapters, which the layout of a whole model cannot hold.",
            hint="merge_lora(model) adds them to its weights first; save_adapter(model, folder) writes them alone.",
        )
    named = layout.architecture if isinstance(layout.architecture, str) else layout.architecture(config)
    document = {"architectures": [named], "model_type": layout.model_type, **layout.config_to_hf(config)}
    state = model.state_dict() if state_dict is None else state_dict
    rules = {rule.theirs: rule for rule in layout.expanded(config)}
    for rule in rules.values():
        _check_whole(rule.ours, state)
    sizes = {theirs: state[rule.ours].nbytes for theirs, rule in rules.items()}
    document["dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")

    def exported(theirs: str) -> Tensor:
        rule = rules[theirs]
        return rule.export(state[rule.ours].detach().cpu()).contiguous()

    write_folder(Path(folder).absolute(), document, sizes, exported, max_shard_bytes)


def load_pretrained(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """Return the model that a folder holds, in eval mode; `dtype` None keeps the stored one.

    The model is built on the meta device and filled tensor by tensor: memory is needed for one copy only.
    """
    path = Path(on_disk(str(folder)))
    if not path.is_dir():
        raise UsageError(f"'{path}' is not a folder.", hint=HUB_HINT)
    document = read_json(path / CONFIG)
    layout = _layout_named(str(document.get("model_type")))
    config = layout.config_from_hf(document)
    with torch.device("meta"):
        model: Any = layout.model(config)
    stored = find_tensors(path)
    rules = _matched(layout, config, stored)
    places = {name: stored[name] for name in rules}
    _check_shapes(model, rules, read_shapes(places))
    state = {
        rules[name].ours: rules[name].load(tensor).to(dtype).contiguous()
        for name, tensor in read_tensors(places, str(device))
    }
    model.load_state_dict(state, strict=False, assign=True)  # a tied head is not a separate tensor
    model.tie()
    filled: nn.Module = model.eval()
    return filled


def new_like(path: Path, changes: Mapping[str, Any], *, weights: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a new model of a folder's shape with some fields of its config changed, and the folder's tensors.

    Those that such a model has are by its names, the others (a head of another task) by theirs. `weights`: False for
    the model alone. A file without the prefix of a base model, such as that of `BertModel`, is read as well.
    """
    document = read_json(path / CONFIG)
    layout = _layout_named(str(document.get("model_type")))
    config = replace(layout.config_from_hf(document), **changes)
    model = layout.model(config)
    if not weights:
        return model, {}
    stored = find_tensors(path)
    rules, _ = _paired(layout, config, stored)
    tensors = read_tensors(stored, "cpu")
    return model, {
        rules[name].ours if name in rules else name: rules[name].load(tensor) if name in rules else tensor
        for name, tensor in tensors
        if name in rules or not name.endswith(layout.tied)
    }


def _layout_named(model_type: str) -> HFMapping:
    if model_type not in LAYOUTS:
        raise ModelError(unknown_name("model_type in config.json", model_type, LAYOUTS))
    return LAYOUTS[model_type]


def _layout_of(model: nn.Module) -> HFMapping:
    for layout in LAYOUTS.values():
        if isinstance(model, layout.model):
            return layout
    names = ", ".join(layout.model.__name__ for layout in LAYOUTS.values())
    wrapped = next((name for name in ("module", "_orig_mod") if isinstance(getattr(model, name, None), nn.Module)), "")
    raise UsageError(
        f"{a_type(model)} has no Hugging Face layout here, {names} have.",
        hint=f"Give the model inside it: model.{wrapped}" if wrapped else "Write its weights: --format safetensors",
    )


def _check_whole(name: str, state: Mapping[str, Tensor]) -> None:
    if name not in state:
        raise ModelError(f"the state dict has no '{name}'.", hint="Save a whole model, not a pipeline stage.")
    tensor: Any = state[name]
    if hasattr(tensor, "full_tensor"):
        raise ModelError(
            f"'{name}' is spread over ranks.", hint="Gather the full state dict and pass it as state_dict=..."
        )
    if tensor.is_meta:
        raise ModelError(f"'{name}' is on the meta device: it has a shape, but no values.")


def _paired(layout: HFMapping, config: Any, stored: Mapping[str, Path]) -> tuple[dict[str, TensorRule], list[str]]:
    """Return the rule of each stored tensor that the model has, and what is missing.

    Base models leave a prefix out; files that were made by TensorFlow call the parts of a LayerNorm gamma and beta.
    """
    rules: dict[str, TensorRule] = {}
    missing = []
    for rule in layout.expanded(config):
        names = [rule.theirs, rule.theirs.removeprefix(layout.prefix)]
        names += [re.sub(r"(?<=LayerNorm\.)\w+$", lambda part: _OLD[part[0]], name) for name in names]
        name = next((name for name in names if name in stored), None)
        if name is None:
            missing.append(rule.theirs)
        else:
            rules[name] = rule
    return rules, missing


_OLD = {"weight": "gamma", "bias": "beta"}


def _matched(layout: HFMapping, config: Any, stored: Mapping[str, Path]) -> dict[str, TensorRule]:
    """Pair stored tensors with rules; nothing may be missing, and nothing left over."""
    rules, missing = _paired(layout, config, stored)
    if missing:
        raise ModelError(f"{len(missing)} tensors of the model are not in the files, the first is '{missing[0]}'.")
    tied_head = "lm_head.weight" if getattr(config, "tie_weights", False) else ""
    left = [name for name in stored if name not in rules and name != tied_head and not name.endswith(layout.ignored)]
    if left:
        raise ModelError(f"{len(left)} tensors in the files do not belong to the model, the first is '{left[0]}'.")
    return rules


def _check_shapes(model: nn.Module, rules: Mapping[str, TensorRule], shapes: Mapping[str, tuple[int, ...]]) -> None:
    parameters = dict(model.named_parameters())
    for name, rule in rules.items():
        expected = tuple(rule.export(parameters[rule.ours].detach()).shape)
        if shapes[name] != expected:
            raise ModelError(
                f"'{name}' has the shape {list(shapes[name])} in the files, but config.json says {list(expected)}."
            )


def from_folder(path: Path, *, weights: bool | None = None, **options: Any) -> nn.Module:
    """Return the model that a folder (or its config.json) describes, ready to train.

    `weights`: True needs the stored weights, False draws new ones; by default they are read where there are any.
    Other options replace values of config.json.
    """
    if not path.exists():
        raise UsageError(f"model = '{path}': there is nothing at that path", hint=HUB_HINT)
    folder, config_file = (path, path / CONFIG) if path.is_dir() else (path.parent, path)
    document = {**read_json(config_file), **options}
    stored = path.is_dir() and any((folder / name).exists() for name in (SINGLE, INDEX))
    if weights and not stored:
        raise UsageError(f"model = '{path}': weights = true, but there is neither {SINGLE} nor {INDEX}")
    use_stored = stored if weights is None else weights
    if use_stored and options:
        raise UsageError(
            f"model = '{path}' reads its stored weights, so {', '.join(options)} cannot be changed",
            hint="Add weights = false for a new model of that shape.",
        )
    layout = LAYOUTS.get(str(document.get("model_type")))
    if layout is None or layout.trained_as == "transformers":
        model = _by_transformers(folder, document, use_stored=use_stored)
    elif use_stored:
        model = load_pretrained(folder).train()
    else:
        model = layout.model(layout.config_from_hf(document))
    model.name_or_path = str(folder)  # type: ignore[assignment]  # as transformers does: where its tokenizer is
    return model


def _by_transformers(folder: Path, document: dict[str, Any], *, use_stored: bool) -> nn.Module:
    named = (document.get("architectures") or [None])[0]
    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"{folder} holds a {named or document.get('model_type')}, which needs transformers",
            hint="Run: pip install transformers",
        ) from None
    if named is None or not hasattr(transformers, named):
        raise UsageError(
            f"{folder / CONFIG}: architectures = {document.get('architectures')!r} is not a class of "
            f"transformers {transformers.__version__}",
            hint='Write "architectures": ["BertForSequenceClassification"] or the like into config.json.',
        )
    kind = getattr(transformers, named)
    if use_stored:
        model: nn.Module = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        return model.train()
    config = transformers.AutoConfig.for_model(document.pop("model_type"), **document)
    built: nn.Module = kind(config)
    return built
