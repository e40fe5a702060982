"""Export a language model or classifier as a Hugging Face folder: weights, config, tokenizer, chat template, labels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from phalanx.recipes import CONVERSATIONS, Recipe
from phalanx.run.export import whole_model
from phalanx.run.record import TEXT_FILES
from phalanx.zoo.data.chat_template import PLAIN, read_template
from phalanx.zoo.data.token_shards import read_tokenizer
from phalanx.zoo.models.hf import save_pretrained
from phalanx.zoo.models.hf.model_folder import end_tokens_of, read_json
from phalanx.zoo.token_data import read_token_manifest

_TOKENIZER_CONFIG = "tokenizer_config.json"


def export_folder(model: nn.Module, path: Path, recipe: Recipe | None = None, classes: Sequence[str] = ()) -> None:
    """Write a model as a Hugging Face folder.

    `recipe`: that of the run; the folder gets the tokenizer and the template of its conversations. `classes`: the names
    of the labels, which the config keeps as id2label.
    """
    chat = _chat_of(recipe) if recipe is not None else None
    model = whole_model(model)
    write_folder: Any = getattr(model, "save_pretrained", None)  # models of transformers have it
    if write_folder is not None:
        write_folder(path)
    else:
        save_pretrained(model, path)
    # The folder that the model was read from: set by transformers, and for our own models.
    _copy_tokenizer(Path(str(getattr(model, "name_or_path", "") or path)), path)
    if chat is not None:
        chat.write(path)
    if classes:
        _name_labels(path / "config.json", classes)


def _name_labels(config: Path, classes: Sequence[str]) -> None:
    """Write the names of labels as transformers has them, where the model has as many outputs."""
    document = read_json(config)
    if len(document.get("id2label", classes)) == len(classes):
        document["id2label"] = {str(number): name for number, name in enumerate(classes)}
        document["label2id"] = {name: number for number, name in enumerate(classes)}
        config.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, target: Path, *, replace: bool = False) -> None:
    """Copy the tokenizer of a folder, if it is one: without it the model's tokens have no meaning."""
    for pattern in TEXT_FILES if source.is_dir() else ():
        for file in source.glob(pattern):
            if file.is_file() and (replace or not (target / file.name).exists()):
                shutil.copy(file, target / file.name)
    if (document := read_token_manifest(source)) is not None and not (target / _TOKENIZER_CONFIG).exists():
        end = read_tokenizer(source / "tokenizer.json").id_to_token(document["tokenizer"]["end"])
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        (target / _TOKENIZER_CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


class _Chat(NamedTuple):
    """What a run made tokens of conversations with."""

    tokenizer: Path
    template: str | None
    """Jinja's text, where it is not the tokenizer's own."""
    end_tokens: frozenset[int]

    def write(self, folder: Path) -> None:
        """Write it where transformers, `phalanx serve` and the next run look for it."""
        _copy_tokenizer(self.tokenizer, folder, replace=True)
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        path = folder / "generation_config.json"
        settings = read_json(path) if path.is_file() else {}
        settings["eos_token_id"] = sorted(self.end_tokens | end_tokens_of(settings))
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _chat_of(recipe: Recipe) -> _Chat | None:
    """Return the tokenizer and template of a run on conversations; of bytes there is none that others could read."""
    data = recipe.fitted().data if recipe.data.get("name") in CONVERSATIONS else {}
    tokenizer, template = data.get("tokenizer"), data.get("template")
    if tokenizer is None:
        return None
    ends = frozenset(read_template(tokenizer, template).end_tokens)
    if template not in (None, "plain"):
        return _Chat(Path(tokenizer), Path(template).expanduser().read_text(encoding="utf-8"), ends)
    return _Chat(Path(tokenizer), None if template is None else PLAIN, ends)
