"""Ship code to nodes that may not see the files of this one: the sources around a script, and a payload.

A node that sees the files of the one that started the launch works in place, whatever is edited meanwhile; so does
one that has the same sources under the same path. Any other imports from a copy. Data files are not sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.host.files import is_trusted, replace_file
from phalanx.host.processes import PACKAGE
from phalanx.launch.spec import CallTarget, ModuleTarget, ScriptTarget, Target

PAYLOAD_NAME = "payload"
_MOST_BYTES = 32 << 20
_NOT_SOURCES = {"__pycache__", "site-packages", "node_modules", "runs", "build", "dist"}


@dataclass(frozen=True)
class SourceArchive:
    """A target, the folder its sources lie in, and their bytes."""

    target: Target
    root: str
    folder: str
    """Where the launch was started: relative paths begin here."""
    sources: dict[str, bytes]
    """Contents by path below `root`. Empty: they must be on every node already."""
    digest: str
    payload: bytes = b""
    import_path: tuple[str, ...] = field(default=())
    """Entries of the import path that are the user's own."""
    marker: str = ""
    """A file of this launch: a node that sees it shares the file system with the one that started it."""


@dataclass(frozen=True)
class UnpackedSources:
    """Where an archive lies on this machine."""

    target: Target
    folder: str
    path: tuple[str, ...]
    in_place: bool
    """Whether this machine sees the files of the one that started the launch."""
    payload_folder: Path | None = None
    """Set where the payload was unpacked too, so that files written next to it must be sent back."""


def pack(target: Target, notice: Callable[[str], None], marker: Path | None = None) -> SourceArchive:
    """Collect the sources of a target. Above 32 MB nothing is sent, and a notice says so."""
    root = _root(target)
    files = dict(_sources(root))
    if sum(map(len, files.values())) > _MOST_BYTES:
        notice(f"the Python files under {root} are over {_MOST_BYTES >> 20} MB: they must be on every node already")
        files = {}
    payload = Path(target.payload).read_bytes() if isinstance(target, CallTarget) and target.payload else b""
    import_path = tuple(entry for entry in map(os.path.abspath, sys.path) if _is_users(entry))
    return SourceArchive(
        target=target,
        root=str(root),
        folder=os.getcwd(),
        sources=files,
        digest=_digest(files),
        payload=payload,
        import_path=import_path,
        marker="" if marker is None else str(marker.absolute()),
    )


def unpack(archive: SourceArchive, scratch: Path) -> UnpackedSources:
    """Use the files that are here already, or unpack those that were sent, in `scratch` or next to it.

    Every attempt of a run must choose the same working folder even if the sources were edited, because relative paths
    lead to its checkpoints.
    """
    target, payload_folder = _unpack_payload(archive, scratch)
    in_place = archive.marker != "" and os.path.exists(archive.marker)
    folder = _working_folder(archive, in_place)
    if folder and (in_place or _has_sources(archive)):
        return UnpackedSources(target, folder, archive.import_path, in_place, payload_folder)
    root = scratch.parent / f"phalanx-ray-{os.getuid()}-{archive.digest}"  # stays, for the restarts of the run
    _unpack_sources(archive, root)
    if isinstance(target, ScriptTarget):
        target = dataclasses.replace(target, path=root / Path(target.path).name)
    return UnpackedSources(target, folder or str(root), (str(root),), in_place, payload_folder)


def _working_folder(archive: SourceArchive, in_place: bool) -> str:
    """Return the launch's own folder where it is of use here, else nothing."""
    folder = archive.folder
    if in_place:
        return folder if os.path.isdir(folder) else ""
    if isinstance(archive.target, ModuleTarget) and archive.sources:
        return ""  # `-m` imports from the working folder first: nothing but what was sent may lie there
    return folder if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK) else ""


def _has_sources(archive: SourceArchive) -> bool:
    """Whether the sources lie here under the same path; of those that were not sent, only whether they are there."""
    if archive.sources:
        return _digest(dict(_sources(Path(archive.root)))) == archive.digest
    if isinstance(archive.target, ScriptTarget):
        return Path(archive.folder, archive.target.path).is_file()
    return os.path.isdir(archive.root)


def _unpack_sources(archive: SourceArchive, root: Path) -> None:
    """Put the sources into `root`, each at once: other ranks of this machine may be reading them there."""
    if not archive.sources:
        raise UsageError(
            f"{socket.gethostname()} lacks {archive.root} or {archive.folder}, and no sources were sent: there are "
            f"none, or more than {_MOST_BYTES >> 20} MB of them.",
            hint="Put them on every node under the same path, or start the script from a folder that holds less.",
        )
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_trusted(root):  # in a folder that all may write, another user could have put code there
        raise UsageError(f"{root} belongs to another user.", hint="Remove it: the sources of this run go there.")
    for name, content in archive.sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)


def _unpack_payload(archive: SourceArchive, scratch: Path) -> tuple[Target, Path | None]:
    target = archive.target
    if not isinstance(target, CallTarget) or not target.payload:
        return target, None
    with contextlib.suppress(OSError):
        payload_file = Path(target.payload)
        if payload_file.stat().st_size == len(archive.payload) and payload_file.read_bytes() == archive.payload:
            return target, None
    folder = scratch / "payload"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PAYLOAD_NAME
    path.write_bytes(archive.payload)
    return dataclasses.replace(target, payload=str(path)), folder


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
    total = 0
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if _may_hold_sources(Path(folder, name)))
        for path in sorted(Path(folder, name) for name in files if name.endswith(".py")):
            with contextlib.suppress(OSError):  # it cannot be imported here either
                if path.is_file():  # not a dangling link, such as editors' locks
                    content = path.read_bytes()
                    total += len(content)
                    yield str(path.relative_to(root)), content
        if total > _MOST_BYTES:
            return


def _may_hold_sources(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in _NOT_SOURCES
    return not hidden and not folder.is_symlink() and not (folder / "pyvenv.cfg").exists()


def _is_users(entry: str) -> bool:
    """Whether a folder of the import path is the user's, not the interpreter's, an environment's or this package's."""
    environments = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
    real = os.path.realpath(entry)
    package_folder = os.path.dirname(os.path.realpath(PACKAGE))
    return real not in {"/", package_folder} and not any(Path(real).is_relative_to(prefix) for prefix in environments)


def _digest(files: dict[str, bytes]) -> str:
    summary = hashlib.blake2b(digest_size=16)
    for name, content in files.items():
        summary.update(f"{name}\0{len(content)}\0".encode())
        summary.update(content)
    return summary.hexdigest()
