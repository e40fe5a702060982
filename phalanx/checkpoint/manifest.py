"""The manifest of a checkpoint (its files, tensors and progress, with a checksum), and the snapshot that is saved."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpoint.hashed_files import FileRecord, checked_name, open_regular
from phalanx.checkpoint.plain import from_json, to_json
from phalanx.errors import EXIT_USAGE, CheckpointError

MANIFEST = "manifest.json"
FORMAT = 4
"""Increased when an older Phalanx can no longer read what is written."""


@dataclass(frozen=True)
class TensorInfo:
    """The global shape and the type of a parameter or buffer, such as `[512, 784]` and `float32`."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint except the tensors."""

    step: int
    epoch: int
    run_id: str
    published_at: float
    """By the clock of the rank that published it, and later than all others in the directory."""
    world_size: int
    torch_version: str
    phalanx_version: str
    files: dict[str, FileRecord]
    tensors: dict[str, TensorInfo]
    shared: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    lineage: list[dict[str, Any]] = field(default_factory=list)
    """The runs that this one continues, the oldest first: `{"run_id": ..., "step": ...}` that it resumed from."""
    kind: str = "sharded"
    """How the tensors are stored: checkpoint_kind."""
    bytes: int = 0
    """The size of the state: of all files together, and of an incremental one's chunks."""
    format: int = FORMAT


def dump_manifest(manifest: Manifest) -> str:
    """Return a manifest as JSON with a checksum."""
    files = {name: {"size": record.size, "hash": record.hash} for name, record in manifest.files.items()}
    body = {**dataclasses.asdict(dataclasses.replace(manifest, files={}, shared={})), "files": files}
    for name in _STORED:
        body[name] = to_json(getattr(manifest, name), name)
    return json.dumps({"checksum": _checksum(body), **body}, indent=1) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`; a CheckpointError says what is wrong with it."""
    file = path / MANIFEST
    try:
        with open_regular(file) as stream:
            text = stream.read().decode()
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MANIFEST}: it was not written completely, or not by Phalanx") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        return _parse(json.loads(text), file)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is truncated or not JSON: {error.msg} at line {error.lineno}") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:  # the checksum can be forged
        raise CheckpointError(f"{file} is not a Phalanx manifest: {type(error).__name__}: {error}") from error


def manifest_at(path: Path) -> Manifest | None:
    """Return the manifest of the checkpoint at `path`; None where there is none, or none that can be read."""
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def _parse(body: Any, file: Path) -> Manifest:
    if not isinstance(body, dict) or not isinstance(body.get("format"), int):
        raise CheckpointError(f"{file} is not a Phalanx manifest: it has no format number")
    version = str(body.get("phalanx_version"))
    version = version if version.isprintable() else "(unknown)"
    if body["format"] < FORMAT:
        raise CheckpointError(
            f"{file} has format {body['format']}; this Phalanx reads format {FORMAT}",
            hint=f"Read it with phalanx {version}, which wrote it.",
        )
    if body["format"] > FORMAT:
        newer = CheckpointError(
            f"{file} has format {body['format']}; this Phalanx reads up to {FORMAT}",
            hint=f"Upgrade: it was written by phalanx {version}.",
        )
        newer.exit_code = EXIT_USAGE  # it is not damaged
        raise newer
    checksum = body.pop("checksum", None)
    if checksum != _checksum(body):
        raise CheckpointError(f"{file} does not match its checksum: it was changed after it was written")
    for name, kind in _WRITTEN.items():
        _checked(body[name], kind)
    body["lineage"] = [
        {"run_id": _checked(run["run_id"], str), "step": _checked(run["step"], int)} for run in body["lineage"]
    ]
    files = {
        checked_name(name): FileRecord(_checked(record["size"], int), _checked(record["hash"], str))
        for name, record in body.pop("files").items()
    }
    tensors = {name: TensorInfo(tuple(info["shape"]), info["dtype"]) for name, info in body.pop("tensors").items()}
    stored = {name: _checked(from_json(body.pop(name)), dict) for name in _STORED}
    return Manifest(**body, **stored, files=files, tensors=tensors)


_STORED = ("shared", "mesh", "config")
_WRITTEN = {
    **dict.fromkeys(("step", "epoch", "world_size", "bytes"), int),
    **dict.fromkeys(("run_id", "kind", "torch_version", "phalanx_version"), str),
    "published_at": float,
}
_LARGEST = 1 << 62


def _checked(value: Any, kind: type) -> Any:
    """Return a value; ValueError where nothing like it is written: it is compared, sorted and made part of names."""
    is_kind = isinstance(value, (int, float) if kind is float else kind)
    if not is_kind or (isinstance(value, (int, float)) and not 0 <= value <= _LARGEST):
        raise ValueError(f"{str(value)[:200]!a} is not a value that is written there")
    return value


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at a step boundary.

    `tensors` is a nested state dict (`{"model": {...}, "optimizer": {...}}`) of tensors, DTensors and plain numbers
    with string keys, which loads at any other layout. `rank_state` belongs to this rank only (random generators).
    `shared` can be stored as JSON; that of rank 0 is saved.
    """

    step: int
    epoch: int
    tensors: dict[str, Any]
    rank_state: Any = None
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A published checkpoint: its path, how long the save took, and its bytes over all ranks."""

    path: Path
    step: int
    seconds: float
    """From the request to the publication, training included."""
    bytes: int
    notes: tuple[str, ...] = ()
    """Notes for the user, such as an old checkpoint that could not be removed."""
    stall: float = 0.0
    """The seconds of these in which training waited."""
    written: int = 0
    """The bytes that were written: of an incremental checkpoint only those of changed chunks."""
