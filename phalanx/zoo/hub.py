"""Repositories of the Hugging Face Hub as folders: `hf://ORG/NAME` for a model, `hf://datasets/ORG/NAME` for data.

The names are those of Hugging Face's own file system. A revision follows an @: `hf://gpt2@607a30d`. Files are kept in
its cache (`HF_HOME`), so that a later run needs no network; a run remembers the folder of the commit that it has used.
Only data are fetched: safetensors, tokenizers and tables, no code and no pickles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from phalanx.errors import UsageError, first_line

PREFIX = "hf://"
HUB_HINT = "A model of the Hugging Face Hub is written as hf://ORG/NAME."
_DATASETS = "datasets/"
_MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_DATA_FILES = ["*.parquet", "*.arrow", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.txt", "*.tar"]


class HubPlace(NamedTuple):
    """A repository of the Hub, a revision of it, and a folder in it."""

    repository: str
    is_data: bool
    revision: str | None
    folder: str


def is_hub(place: object) -> bool:
    """Whether a text names a repository of the Hub."""
    return isinstance(place, str) and place.startswith(PREFIX)


def on_disk(place: str) -> str:
    """Return the folder of a repository of the Hub, downloaded if it is not there; other places as they are."""
    return str(hub_folder(place)) if is_hub(place) else place


def hub_folder(text: str) -> Path:
    """Return the folder with the files of a repository, downloaded if they are not there."""
    place = _read(text)
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise UsageError(f"{text} needs the library huggingface_hub", hint="Run: pip install huggingface_hub") from None
    below = f"{place.folder}/" if place.folder else ""
    wanted = [below + pattern for pattern in (_DATA_FILES if place.is_data else _MODEL_FILES)]
    kind: dict[str, Any] = {"repo_type": "dataset"} if place.is_data else {}
    option = " --repo-type dataset" if place.is_data else ""
    elsewhere = f"hf download {place.repository}{option} --local-dir FOLDER"
    try:
        root = snapshot_download(place.repository, revision=place.revision, allow_patterns=wanted, **kind)
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        is_gated = isinstance(error, errors.GatedRepoError)
        problem = "its owner must let you in" if is_gated else "the Hub has no such repository, or a private one"
        raise UsageError(f"{text}: {problem}", hint="Log in with: hf auth login") from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"{text}: the repository has no revision '{place.revision}'") from None
    except errors.HFValidationError as error:
        raise UsageError(f"{text} is no name of the Hub: {first_line(error)}", hint=_FORMAT) from None
    except (OSError, errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as error:
        raise UsageError(
            f"{text} is not in the cache and cannot be downloaded: {first_line(error)}",
            hint=f"On a machine with a network: {elsewhere}\n  Copy the folder, and write its path.",
        ) from None
    folder = Path(root, place.folder)
    if not folder.is_dir() or not any(folder.iterdir()):
        what = "tables" if place.is_data else "safetensors or config.json"
        raise UsageError(f"{text}: there are no {what} in it{f', in {place.folder}' if place.folder else ''}")
    return folder


_FORMAT = "Write hf://ORG/NAME for a model, hf://datasets/ORG/NAME for data, with @REVISION or /FOLDER after it."


def _read(text: str) -> HubPlace:
    rest = text.removeprefix(PREFIX)
    is_data = rest.startswith(_DATASETS)
    parts = rest.removeprefix(_DATASETS).strip("/").split("/")
    if not all(parts):
        raise UsageError(f"{text} names no repository", hint=_FORMAT)
    # Old models, such as gpt2, have no owner; what follows the name of another repository is a folder.
    owned = 2 if len(parts) > 1 else 1
    *owner, named = parts[:owned]
    name, at, revision = named.partition("@")
    if not name or (at and not revision):
        raise UsageError(f"{text} names no repository", hint=_FORMAT)
    return HubPlace("/".join([*owner, name]), is_data, revision or None, "/".join(parts[owned:]))
