"""Start from the weights of another model: a run, a Hugging Face folder, or a file; a new task gets a new head.

`[model] pretrained = "..."` works with every reference model. The shape is that of the source, or of the recipe for a
file of weights; tensors of the same name and shape are taken, the others are drawn, and the log names them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.checkpoint.manifest import MANIFEST
from phalanx.errors import CheckpointError, UsageError, a_type
from phalanx.recipes import Recipe
from phalanx.recipes.imports import unknown_option
from phalanx.run.stored import StoredRun
from phalanx.run.weights import load_weights, read_weights
from phalanx.zoo.data import takes
from phalanx.zoo.hub import HUB_HINT, on_disk
from phalanx.zoo.models.hf import new_like
from phalanx.zoo.models.hf.model_folder import CONFIG
from phalanx.zoo.models.image_weights import own_names, timm_file, timm_note
from phalanx.zoo.models.registry import build, build_options, module_of

_OWN = ("task", "classes", "dropout", "drop_path")
"""Options that are those of the new model; all others are the shape of the source."""
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json")
_LEAST = 0.5
"""The share of a model's weights that a source of the same kind has: all but the head."""


def build_pretrained(name: str, *, pretrained: str, weights: bool = True, **options: Any) -> nn.Module:
    """Return a new model with the weights of `pretrained`; the other options are as those of `build`.

    `weights`: False for the shape alone. What was taken is the model's attribute `weights_note`.
    """
    source = on_disk(pretrained)
    for key in options:
        if key not in (known := build_options(name)):
            raise unknown_option(f"model '{name}'", key, known)
    of_shape = {key: value for key, value in options.items() if key in _OWN}
    path = Path(str(source))
    state: Mapping[str, Any]
    file = timm_file(path, CONFIG) if (path / CONFIG).is_file() else path if path.is_file() else None
    if file is not None:
        of_shape, model = options, build(name, **options)
        state = own_names(model, read_weights(file)) if weights else {}
    elif (path / CONFIG).is_file():
        model, state = new_like(path, of_shape, weights=weights)
    else:
        model, state = _like_run(path, of_shape, weights=weights)
    if type(model).__module__ != module_of(name):
        raise UsageError(f"model.pretrained = '{source}' holds {a_type(model)}, which is not a '{name}'")
    if weights:
        decided = [key for key in options if key not in of_shape]
        note = _fill(model, state, path) + (f"; it decides on {', '.join(decided)}" if decided else "")
        is_timm = file is not None and file != path
        model.weights_note = note + (timm_note(path, CONFIG) if is_timm else "")  # type: ignore[assignment]
    return model


def _like_run(path: Path, of_shape: Mapping[str, Any], *, weights: bool) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a new model of a run's (or checkpoint's) shape, and the weights of its best checkpoint."""
    run, checkpoint = _stored(path)
    recipe = run.recipe
    if recipe is None:
        raise UsageError(
            f"model.pretrained = '{path}' was not trained from a recipe, so its model is not known",
            hint="Write its weights as a Hugging Face folder, or as a file: phalanx export RUN -o weights.safetensors",
        )
    table = dict(recipe.model)
    make = partial(build_pretrained, weights=False) if "pretrained" in table else build
    source: nn.Module = make(table.pop("name"), **table)
    config: Any = getattr(source, "config", None)
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise UsageError(f"model.pretrained = '{path}': {a_type(source)} is read from a file of weights only")
    kind: Any = type(source)
    new: nn.Module = kind(dataclasses.replace(config, **of_shape))
    if not weights:
        return new, {}
    checkpoint = checkpoint or run.best_checkpoint or next(iter(reversed(run.checkpoints)), None)
    if checkpoint is None:
        raise UsageError(f"model.pretrained = '{path}' has no checkpoint in {run.checkpoint_dir}")
    load_weights(source, checkpoint)
    return new, source.state_dict()


def _stored(path: Path) -> tuple[StoredRun, Path | None]:
    if not path.is_dir():
        raise UsageError(
            f"model.pretrained = '{path}': there is nothing at that path",
            hint=f"Give a run, a checkpoint, a Hugging Face folder, or a file of weights. {HUB_HINT}",
        )
    is_checkpoint = (path / MANIFEST).is_file()
    return (StoredRun(path.absolute().parent.parent), path) if is_checkpoint else (StoredRun(path), None)


def _fill(model: nn.Module, state: Mapping[str, Any], source: Path) -> str:
    """Load the tensors that fit into a model; return what was taken, what is new and what was left out."""
    here = model.state_dict()
    fitting = {n: value for n, value in state.items() if n in here and here[n].shape == value.shape}
    count, needed = (sum(here[name].numel() for name in names) for names in (fitting, here))
    if count < _LEAST * needed:
        raise CheckpointError(
            f"model.pretrained = '{source}' has {count:,} of the {needed:,} weights of the model: it is another model"
        )
    model.load_state_dict(fitting, strict=False)
    new, left = [name for name in here if name not in fitting], [name for name in state if name not in fitting]
    note = f"weights of {source}: {len(fitting)} tensors"
    return note + _listed("new", new) + _listed("left out", left)


def _listed(title: str, names: Iterable[str]) -> str:
    text = ", ".join(names)
    return f"; {title}: {text}" if text else ""


def tokenizer_of(recipe: Recipe) -> str | None:
    """Return the tokenizer of a recipe's tokens, a folder or a file tokenizer.json; None for bytes."""
    root = recipe.data.get("root") or recipe.data.get("name", "")
    root = root if isinstance(root, str) else root[0]
    candidates = [recipe.data.get("tokenizer"), str(Path(root) / "tokenizer"), root, recipe.model.get("name", "")]
    for candidate in filter(None, candidates):
        if _has_tokenizer(Path(candidate)):
            return str(candidate)
    return pretrained_tokenizer(recipe.model.get("pretrained"))


def pretrained_tokenizer(source: str | None) -> str | None:
    """Return the tokenizer of what a model starts from; None where it has none."""
    if source is None or not Path(source).is_dir() or _has_tokenizer(Path(source)):
        return source if source is not None and Path(source).is_dir() else None
    if (Path(source) / CONFIG).is_file():
        return None
    run = _stored(Path(source))[0]
    if run.recipe is None or run.record is None:
        return None
    return tokenizer_of(run.recipe)


def with_source_tokenizer(data: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a recipe's data with the tokenizer of what its model starts from."""
    return with_tokenizer(data, pretrained_tokenizer(source))


def with_tokenizer(data: dict[str, Any], tokenizer: str | None) -> dict[str, Any]:
    """Return a recipe's data with a tokenizer, where they name none and can have one."""
    if tokenizer is None or "tokenizer" in data or not takes(str(data["name"]), "tokenizer"):
        return data
    return {**data, "tokenizer": tokenizer}


def _has_tokenizer(path: Path) -> bool:
    is_tokenizer = path.name == _TOKENIZERS[0] and path.is_file()
    return is_tokenizer or any((path / name).is_file() for name in _TOKENIZERS)
