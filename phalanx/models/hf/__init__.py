"""Load and save Hugging Face checkpoints: GPT-2 and Llama as our own classes, others by transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ModelError, UsageError, unknown_name
from phalanx.models.decoder import Decoder
from phalanx.models.hf.files import (
    CONFIG,
    INDEX,
    SINGLE,
    find_tensors,
    read_json,
    read_shapes,
    read_tensors,
    write_folder,
)
from phalanx.models.hf.mapping import LAYOUTS, HFMapping, TensorRule
from phalanx.models.lora import adapters


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
    document = {"architectures": [layout.architecture], "model_type": layout.model_type, **layout.config_to_hf(config)}
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
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"'{path}' is not a folder.", hint="Give a local folder: nothing is downloaded.")
    document = read_json(path / CONFIG)
    layout = _layout_named(str(document.get("model_type")))
    config = layout.config_from_hf(document)
    with torch.device("meta"):
        model = layout.model(config)
    rules, places = _matched(layout, config, find_tensors(path))
    _check_shapes(model, rules, read_shapes(places))
    state = {
        rules[name].ours: rules[name].load(tensor).to(dtype).contiguous()
        for name, tensor in read_tensors(places, str(device))
    }
    model.load_state_dict(state, strict=False, assign=True)  # a tied head is not a separate tensor
    if isinstance(model, Decoder):
        model.tie()
    return model.eval()


def _layout_named(model_type: str) -> HFMapping:
    if model_type not in LAYOUTS:
        raise ModelError(unknown_name("model_type in config.json", model_type, LAYOUTS))
    return LAYOUTS[model_type]


def _layout_of(model: nn.Module) -> HFMapping:
    for layout in LAYOUTS.values():
        if isinstance(model, layout.model):
            return layout
    names = " and ".join(layout.model.__name__ for layout in LAYOUTS.values())
    raise ModelError(
        f"a {type(model).__name__} has no Hugging Face layout here, {names} have.",
        hint="Give the model itself: unwrap it from DDP or torch.compile first.",
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


def _matched(
    layout: HFMapping, config: Any, stored: Mapping[str, Path]
) -> tuple[dict[str, TensorRule], dict[str, Path]]:
    """Pair stored tensors with rules; nothing may be missing, and nothing left over."""
    rules: dict[str, TensorRule] = {}
    missing = []
    for rule in layout.expanded(config):
        bare = rule.theirs.removeprefix(layout.prefix)
        name = rule.theirs if rule.theirs in stored else bare
        if name in stored:
            rules[name] = rule
        else:
            missing.append(rule.theirs)
    if missing:
        raise ModelError(f"{len(missing)} tensors of the model are not in the files, the first is '{missing[0]}'.")
    tied_head = "lm_head.weight" if config.tie_weights else ""
    left = [name for name in stored if name not in rules and name != tied_head and not name.endswith(layout.ignored)]
    if left:
        raise ModelError(f"{len(left)} tensors in the files do not belong to the model, the first is '{left[0]}'.")
    return rules, {name: stored[name] for name in rules}


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
        raise UsageError(f"model = '{path}': there is nothing at that path")
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
    if str(document.get("model_type")) not in LAYOUTS:
        model = _by_transformers(folder, document, use_stored=use_stored)
    elif use_stored:
        model = load_pretrained(folder).train()
    else:
        layout = _layout_named(str(document["model_type"]))
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
    made: nn.Module = kind(config)
    return made
