"""The storage that a path or a URL means."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpoint.storage import Storage
from phalanx.host.remote import RemotePath, as_path


def storage_at(directory: Path | str) -> Storage:
    """Return the storage that a user names, in a folder or at a URL."""
    path = as_path(directory)
    if not isinstance(path, RemotePath):
        return Storage(path)
    from phalanx.checkpoint.remote import RemoteStorage  # most runs save in a folder

    return RemoteStorage(path)


def storage_and_name(path: Path | str) -> tuple[Storage, str]:
    """Return the storage and the name of the checkpoint at `path`."""
    path = as_path(path)
    return storage_at(path.parent), path.name
