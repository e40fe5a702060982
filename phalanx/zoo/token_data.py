"""What a recipe learns from a folder of token shards before anything starts: its vocabulary and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import DataError, UsageError

if TYPE_CHECKING:
    from phalanx.recipes import Recipe

MANIFEST = "manifest.json"
TOKEN_FORMAT = "phalanx-tokens"
_DECODERS = ("gpt", "llama", "moe")


def read_token_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder of token shards; None where the folder is not one."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path} cannot be read: {error}", hint="Write the folder again: phalanx data tokenize"
        ) from None
    if not isinstance(document, dict) or document.get("format") != TOKEN_FORMAT:
        return None
    if document.get("version") != 1:
        raise DataError(f"{path} has version {document.get('version')!r}; this Phalanx reads version 1")
    return document


def fitted_to_tokens(recipe: Recipe) -> Recipe:
    """Return a recipe of token shards with their vocabulary in its model, and their tokenizer in its sample.

    Its data are the path of such a folder, or `name = "tokens"` with `root`, or with `sources = [{path, weight}, ...]`.
    """
    data = _located_data(recipe.data)
    paths = [source["path"] for source in data.get("sources", ())] or [data.get("root") or data["name"]]
    folder = Path(paths[0])
    document = read_token_manifest(folder)
    if document is None:
        return recipe
    if data["name"] != "tokens":
        data |= {"name": "tokens", "root": data["name"]}
    sample = recipe.sample
    if sample:
        sample = {"tokenizer": str(folder / "tokenizer.json"), **sample}
    model = _with_vocabulary(recipe.model, document["tokenizer"]["vocab_size"], folder)
    return replace(recipe, data=data, model=model, sample=sample)


def _located_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data with absolute paths: ranks, and a later command, may run in another folder."""
    located = dict(data)
    if isinstance(data.get("root"), str):
        located["root"] = _located(data["root"])
    sources = data.get("sources", ())
    if not isinstance(sources, (list, tuple)) or not all(
        isinstance(source, Mapping) and isinstance(source.get("path"), str) for source in sources
    ):
        raise UsageError(
            f"data.sources = {sources!r}: expected a list of tables with path and weight",
            hint='Write: --set \'data.sources=[{path = "code", weight = 3}, {path = "prose", weight = 1}]\'',
        )
    if sources:
        located["sources"] = [{**source, "path": _located(source["path"])} for source in sources]
    return located


def _located(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _with_vocabulary(model: dict[str, Any], vocabulary: int, folder: Path) -> dict[str, Any]:
    if model["name"] not in _DECODERS:
        return model
    size = model.get("vocab_size", vocabulary)
    if size < vocabulary:
        raise UsageError(
            f"model.vocab_size = {size}, but the tokenizer of {folder} has {vocabulary} tokens",
            hint=f"Leave it out, or write: --set model.vocab_size={vocabulary}",
        )
    return {**model, "vocab_size": size}
