"""Repositories of the Hugging Face Hub as folders: `hf://ORG/NAME` for a model, `hf://datasets/ORG/NAME` for data.

The names are those of Hugging Face's own file system: a revision follows an @ (`hf://gpt2@607a30d`), a folder, a file
or a pattern the name (`hf://datasets/nyu-mll/glue/mrpc`). Files are kept in its cache (`HF_HOME`), so that a later run
needs no network; a run remembers the folder of the commit that it has used. Only data are fetched: safetensors,
tokenizers and tables, no code and no pickles.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from phalanx.errors import UsageError, first_line

PREFIX = "hf://"
HUB_HINT = "A model of the Hugging Face Hub is written as hf://ORG/NAME."
_DATASETS = "datasets/"
_FORMAT = "Write hf://ORG/NAME for a model, hf://datasets/ORG/NAME for data, with @REVISION or /FOLDER after it."
_REVISION = re.compile(r"refs/(?:convert|pr)/[^/]+|[^/]+")
_FILES = {
    "model": ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
    "tokenizer": [
        "tokenizer*",
        "*vocab*",
        "merges.txt",
        "special_tokens_map.json",
        "config.json",
        "*.model",
        "*.jinja",
    ],
    "data": ["*.parquet", "*.arrow", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.txt", "*.tar"],
}
"""The files of a repository that are fetched for a purpose."""


_NOUNS = {"model": "a model", "tokenizer": "a tokenizer", "data": "a data set"}


class HubPlace(NamedTuple):
    """A repository of the Hub, a revision of it, and a folder or file in it."""

    repository: str
    is_data: bool
    revision: str | None
    path: str


def is_hub(place: object) -> bool:
    """Whether a text names a repository of the Hub."""
    return isinstance(place, str) and place.startswith(PREFIX)


def on_disk(place: str, purpose: str = "model") -> str:
    """Return the path of a repository of the Hub, downloaded if it is not there; other places as they are."""
    return str(hub_path(place, purpose)) if is_hub(place) else place


def hub_path(text: str, purpose: str = "model") -> Path:
    """Return the folder (or file, or pattern) of a repository on this disk, downloaded if it is not there.

    `purpose`: "model", "tokenizer" or "data".
    """
    place = _read(text)
    if place.is_data != (purpose == "data"):
        kind, hint = ("a data set", HUB_HINT) if place.is_data else ("a model", "A data set is hf://datasets/ORG/NAME.")
        raise UsageError(f"{text} names {kind}, and {_NOUNS[purpose]} is needed", hint=hint)
    root = Path(_downloaded(text, place, purpose))
    entries = root.glob(place.path) if place.path else [root]
    files = [file for entry in entries for file in (entry.rglob("*") if entry.is_dir() else [entry]) if file.is_file()]
    within = f" in {place.path}" if place.path else ""
    if not files:
        raise UsageError(
            f"{text}: no {'tables' if purpose == 'data' else f'files of {_NOUNS[purpose]}'} were found{within}",
            hint="Without a network, only models in the cache are found.",
        )
    if purpose == "model" and not any(file.suffix == ".safetensors" for file in files):
        raise UsageError(
            f"{text} has no weights as safetensors{within}; pickles (pytorch_model.bin) are not read",
            hint="Look for a revision that has them, often hf://ORG/NAME@refs/pr/1.",
        )
    return root / place.path


def _downloaded(text: str, place: HubPlace, purpose: str) -> str:
    """Return the folder of a snapshot that has the files for a purpose."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise UsageError(f"{text} needs the library huggingface_hub", hint="Run: pip install huggingface_hub") from None
    below = f"{place.path}/" if place.path else ""
    # What follows the name may be a folder, or a file or pattern itself.
    wanted = [*filter(None, [place.path]), *(below + pattern for pattern in _FILES[purpose])]
    kind: dict[str, Any] = {"repo_type": "dataset"} if place.is_data else {}
    # A pattern matches folders below, too; "consolidated" is another copy of the weights.
    ignored = None if place.is_data else [f"{below}*/*", f"{below}consolidated*"]
    option = " --repo-type dataset" if place.is_data else ""
    elsewhere = f"hf download {place.repository}{option} --local-dir FOLDER"
    try:
        folder: str = snapshot_download(
            place.repository, revision=place.revision, allow_patterns=wanted, ignore_patterns=ignored, **kind
        )
    except errors.GatedRepoError:
        raise UsageError(
            f"{text}: access to this repository must be requested on its page of the Hub",
            hint="Then log in with: hf auth login",
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{text}: the Hub has no such repository, or it is private", hint="Log in with: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"{text}: the repository has no revision '{place.revision}'") from None
    except errors.HFValidationError as error:
        raise UsageError(f"{text} is not a valid repository name: {first_line(error)}", hint=_FORMAT) from None
    except (OSError, errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as error:
        raise UsageError(
            f"{text} is not in the cache and cannot be downloaded: {first_line(error)}",
            hint=f"On a machine with a network: {elsewhere}\n  Copy the folder, and write its path.",
        ) from None
    return folder


def _read(text: str) -> HubPlace:
    rest = text.removeprefix(PREFIX)
    is_data = rest.startswith(_DATASETS)
    name, at, after = rest.removeprefix(_DATASETS).strip("/").partition("@")
    revision: str | None = None
    if at:
        match = _REVISION.match(unquote(after))
        revision, after = (match[0], unquote(after)[match.end() :]) if match else (None, "")
    parts = name.split("/")
    # Old models, such as gpt2, have no owner; what follows the name of another repository is a path in it.
    repository, inner = parts[:2], [*parts[2:], *after.split("/")] if at else parts[2:]
    if not all(repository) or (at and not revision):
        raise UsageError(f"{text} names no repository", hint=_FORMAT)
    return HubPlace("/".join(repository), is_data, revision, "/".join(filter(None, inner)))
