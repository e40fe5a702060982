"""A model from a Hugging Face folder or config.json: GPT-2 and Llama as our own classes, others by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from phalanx.errors import UsageError
from phalanx.models.hf import _LAYOUTS, _layout_named, load_pretrained
from phalanx.models.hf.files import CONFIG, INDEX, SINGLE, read_json


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
    if str(document.get("model_type")) not in _LAYOUTS:
        model = _by_transformers(folder, document, use_stored=use_stored)
    elif use_stored:
        model = load_pretrained(folder).train()
    else:
        layout = _layout_named(str(document["model_type"]))
        model = layout.build(layout.config_from_hf(document))
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
