"""Checkpoints at a URL: files are streamed in parts under their final name, and the manifest, the last one, publishes.

A store has no atomic rename, so a checkpoint without a manifest does not count, and every save has a name that no other
save has, as in `step-00000100-5f0c1e`: few stores refuse a name that another run takes at the same time. While one is
written, an object `.writing-...` names it and its writer, so that a later save can remove what a failed one left.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from phalanx.checkpoint.hashed_files import FileRecord, HashedFile, hashed_file
from phalanx.checkpoint.lock import has_ended
from phalanx.checkpoint.manifest import MANIFEST, Manifest, dump_manifest, manifest_at
from phalanx.checkpoint.publish import is_published, owner_of, step_name, writing_name
from phalanx.checkpoint.storage import Draft, Reader, Storage
from phalanx.host.remote import RemotePath

_PIECE_BYTES = 16 << 20
"""What is handed to or read from the store at a time; it sends parts of its own size."""


class RemoteReader:
    """A file at a URL, read by ranges."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self.size = path.stat().st_size

    def read_into(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fill the parts, one after the other, from this position."""
        for part in parts:
            for start in range(0, part.nbytes, _PIECE_BYTES):
                piece = part[start : start + _PIECE_BYTES]
                data = self._path.read_range(offset, offset + piece.nbytes)
                if len(data) != piece.nbytes:
                    raise OSError(0, "the file ends too early", str(self._path))
                piece[:] = data
                offset += len(data)

    def close(self) -> None:
        """Do nothing: every read is its own request."""


class RemoteFile(HashedFile):
    """A new file at a URL, hashed while it is uploaded in parts; memory is bounded by the size of a part."""

    def __init__(self, path: Path) -> None:
        assert isinstance(path, RemotePath)
        path.prepare()
        super().__init__(path)

    def _append(self, piece: memoryview, offset: int) -> None:
        self._file.write(piece)

    def finish(self) -> FileRecord:
        """Complete the upload and return the record of the file."""
        self.flush()
        self._file.close()
        stored = self.path.stat().st_size
        if stored != self.size:
            raise OSError(0, f"the store has {stored:,} of {self.size:,} bytes", str(self.path))
        return self._hash.record(self.size)

    def release(self) -> None:
        """Release the hashing threads; an upload that is not complete is aborted."""
        self._threads.shutdown()
        self._file.discard()  # type: ignore[attr-defined]


class RemoteDraft(Draft):
    """A checkpoint at a URL whose manifest is not there yet; an object with the name of its token announces it."""

    path: RemotePath

    def create(self, name: str) -> AbstractContextManager[HashedFile]:
        """Return a new file, which is uploaded in parts."""
        return hashed_file(self.path / name, self.records, RemoteFile)

    def read(self, name: str) -> Reader:
        """Open a file that any rank has created."""
        return RemoteReader(self.path / name)

    @property
    def _marker(self) -> RemotePath:
        return self.path.parent / self.token

    def publish(self, manifest: Manifest) -> str:
        """Upload the manifest; then remove this run's earlier checkpoint of the same step."""
        (self.path / MANIFEST).write_bytes(dump_manifest(manifest).encode())
        self._marker.unlink(missing_ok=True)
        for path in self.path.parent.glob(f"{step_name(manifest.step)}*"):
            other = None if path == self.path else manifest_at(path)
            if other is not None and other.run_id == manifest.run_id:
                remove_remote(path)
        return self.path.name

    def discard(self) -> None:
        """Remove everything; what cannot be removed is left for a later save."""
        with contextlib.suppress(OSError):
            _sweep(self._marker, self.path)


class RemoteStorage(Storage):
    """A directory of checkpoints at a URL."""

    directory: RemotePath

    def begin(self, step: int) -> RemoteDraft:
        """Announce the name of a new checkpoint, after removing what failed saves left."""
        for token in self.names():
            if token.startswith(".writing-") and _is_abandoned(self.directory / token):
                _sweep(self.directory / token)
        name, token = f"{step_name(step)}-{secrets.token_hex(3)}", writing_name(step)
        (self.directory / token).write_bytes(json.dumps({"name": name}).encode())
        return RemoteDraft(self.directory / name, token)

    def join(self, token: str) -> RemoteDraft:
        """Return the unfinished checkpoint that another rank has begun."""
        return RemoteDraft(self.directory / _announced(self.directory / token), token)

    def resume_copy(self, token: str, name: str) -> RemoteDraft:
        """Return the unfinished copy, whose files have their final names."""
        (self.directory / token).write_bytes(b"")
        return RemoteDraft(self.directory / name, token)

    def open(self, name: str, file: str) -> Reader:
        """Open a file for reading."""
        return RemoteReader(self.directory / name / file)

    def put(self, name: str, file: str, data: bytes | memoryview) -> None:
        """Write a small file as a whole."""
        (self.directory / name / file).write_bytes(data)

    def list(self, name: str) -> list[str]:
        """Return the files of an entry."""
        return RemoteStorage(self.directory / name).names()

    def remove(self, name: str) -> None:
        """Remove a checkpoint."""
        remove_remote(self.directory / name)


def remove_remote(path: RemotePath) -> None:
    """Remove a checkpoint, the manifest first: what remains after a failure does not count as one."""
    (path / MANIFEST).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.remove_tree()


def _announced(marker: RemotePath) -> str:
    name = str(json.loads(marker.read_bytes())["name"])
    if not is_published(name) or "/" in name:
        raise OSError(0, f"{marker} does not name a checkpoint", str(marker))
    return name


def _is_abandoned(marker: RemotePath) -> bool:
    owner = owner_of(marker.name)
    return owner is not None and has_ended(owner, time.time() - marker.stat().st_mtime)


def _sweep(marker: RemotePath, path: RemotePath | None = None) -> None:
    """Remove what an unfinished save has uploaded, then its marker."""
    path = path or marker.parent / _announced(marker)
    if not (path / MANIFEST).exists():
        path.call(_abort_uploads)
        with contextlib.suppress(FileNotFoundError):
            path.remove_tree()
    marker.unlink(missing_ok=True)


def _abort_uploads(files: object, key: str) -> None:
    """Abort multipart uploads under a name in S3: their parts are charged for until then."""
    if not hasattr(files, "list_multipart_uploads"):
        return
    bucket, _, prefix = key.partition("/")
    with contextlib.suppress(PermissionError):  # it needs a permission that saving does not
        for upload in files.list_multipart_uploads(bucket):
            if upload["Key"].startswith(f"{prefix}/"):
                files.abort_mpu(bucket, upload["Key"], upload["UploadId"])  # type: ignore[attr-defined]
