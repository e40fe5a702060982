"""What must travel to machines that may not see the files of this one: the sources around a script, and a payload.

A machine that finds the same sources under the same path works in place; any other unpacks them into a folder of its
own. Data files do not travel.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.launch.spec import CallTarget, ScriptTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.launch.spec import Target

PAYLOAD_NAME = "payload"
_MOST_BYTES = 32 << 20
_NOT_SOURCES = {"__pycache__", "site-packages", "node_modules", "runs", "build", "dist"}


@dataclass(frozen=True)
class Luggage:
    """A target, the folder its sources lie in, and their bytes."""

    target: Target
    root: str
    folder: str
    """Where the launch was started: relative paths are meant from here."""
    sources: bytes
    digest: str
    payload: bytes = b""
    own_path: tuple[str, ...] = field(default=())
    """Entries of the import path that are the user's own."""


@dataclass(frozen=True)
class Unpacked:
    """Where the luggage lies on this machine."""

    target: Target
    folder: str
    path: tuple[str, ...]
    in_place: bool
    """Whether this machine sees the files of the one that started the launch."""
    payload_folder: Path | None = None
    """Set where the payload was unpacked too, so that what appears beside it must be sent back."""


def pack(target: Target, notice: Callable[[str], None]) -> Luggage:
    """Collect the sources of a target. Above 32 MB nothing is sent, and the user is told to bring them himself."""
    root = _root(target)
    files = dict(_sources(root))
    if sum(map(len, files.values())) > _MOST_BYTES:
        notice(f"the Python files under {root} are over {_MOST_BYTES >> 20} MB: they must be on every machine already")
        files = {}
    payload = Path(target.payload).read_bytes() if isinstance(target, CallTarget) and target.payload else b""
    own = tuple(entry for entry in map(os.path.abspath, sys.path) if _is_users(entry))
    return Luggage(target, str(root), os.getcwd(), _tar(files), _digest(files), payload, own)


def unpack(luggage: Luggage, scratch: Path) -> Unpacked:
    """Use the files that are here already, or lay out those that were sent, in `scratch` or beside it."""
    in_place = os.path.isdir(luggage.folder) and _digest(dict(_sources(Path(luggage.root)))) == luggage.digest
    target, payload_folder = _place_payload(luggage, scratch)
    if in_place:
        return Unpacked(target, luggage.folder, luggage.own_path, True, payload_folder)
    root = scratch.parent / f"phalanx-ray-{luggage.digest}"  # stays, so that a restart finds what relative paths name
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(luggage.sources)) as archive:
        archive.extractall(root, filter="data")
    if isinstance(target, ScriptTarget):
        target = dataclasses.replace(target, path=root / Path(target.path).name)
    return Unpacked(target, str(root), (str(root),), False, payload_folder)


def _place_payload(luggage: Luggage, scratch: Path) -> tuple[Target, Path | None]:
    target = luggage.target
    if not isinstance(target, CallTarget) or not target.payload:
        return target, None
    if _holds(Path(target.payload), luggage.payload):
        return target, None
    folder = scratch / "payload"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PAYLOAD_NAME
    path.write_bytes(luggage.payload)
    return dataclasses.replace(target, payload=str(path)), folder


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.stat().st_size == len(content) and path.read_bytes() == content
    except OSError:
        return False


def _root(target: Target) -> Path:
    """Return the folder that Python itself would put first on the import path."""
    if isinstance(target, ScriptTarget):
        return Path(target.path).resolve().parent
    first = sys.path[0] if isinstance(target, CallTarget) and sys.path else ""
    return Path(first or os.getcwd()).resolve()


def _sources(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the Python files below a folder in a fixed order, without environments, caches and hidden folders."""
    if not root.is_dir() or not _is_users(str(root)):
        return
    taken = 0
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if _may_hold_sources(Path(folder, name)))
        for name in sorted(files):
            if name.endswith(".py"):
                content = Path(folder, name).read_bytes()
                taken += len(content)
                yield os.path.relpath(os.path.join(folder, name), root), content
        if taken > _MOST_BYTES:
            return


def _may_hold_sources(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in _NOT_SOURCES
    return not hidden and not folder.is_symlink() and not (folder / "pyvenv.cfg").exists()


def _is_users(entry: str) -> bool:
    """Whether a folder of the import path is the user's, not the interpreter's, an environment's or our own."""
    environments = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
    real = os.path.realpath(entry)
    own = os.path.realpath(Path(__file__).resolve().parents[2])
    return real not in {"/", own} and not any(Path(real).is_relative_to(prefix) for prefix in environments)


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _digest(files: dict[str, bytes]) -> str:
    summary = hashlib.blake2b(digest_size=16)
    for name, content in files.items():
        summary.update(f"{name}\0{len(content)}\0".encode())
        summary.update(content)
    return summary.hexdigest()
