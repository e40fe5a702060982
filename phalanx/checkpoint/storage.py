"""Where checkpoints are: a `Storage` is a directory of checkpoints, in a file system or behind a URL.

An unfinished checkpoint is a `Draft`. Rank 0 begins it, the other ranks join it by its token, every rank creates its
own files, and rank 0 publishes it with the manifest, after which it counts as a checkpoint.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from phalanx.checkpoint import collectives
from phalanx.checkpoint.hashed_files import (
    FileRecord,
    HashedFile,
    hashed_file,
    open_regular,
    sync_directory,
    write_failed,
)
from phalanx.checkpoint.manifest import MANIFEST, Manifest, dump_manifest
from phalanx.checkpoint.publish import clear_leftovers, publish, remove, writing_name
from phalanx.errors import CheckpointError
from phalanx.host.files import make_private, replacing
from phalanx.host.remote import RemotePath, as_path


class Reader(Protocol):
    """A file that is read at any position, by several threads at a time."""

    size: int

    def read_into(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fill the parts, one after the other, from this position; OSError where the file ends before."""

    def close(self) -> None:
        """Release the file."""


class LocalReader:
    """A file in a file system."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)
        self._path = path
        self.size = os.fstat(self._file.fileno()).st_size

    def read_into(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fill the parts; a read may return less than requested, only an empty one is the end."""
        rest = [part for part in parts if part.nbytes]
        while rest:
            count = os.preadv(self._file.fileno(), rest[:_VECTORS], offset)
            if count == 0:
                raise OSError(0, "the file ends too early", str(self._path))
            offset += count
            while rest and count >= rest[0].nbytes:
                count -= rest.pop(0).nbytes
            if count:
                rest[0] = rest[0][count:]

    def close(self) -> None:
        """Release the file."""
        self._file.close()


_VECTORS = 512
"""Buffers per system call: Linux allows 1024."""


class Draft:
    """A checkpoint that is being written and does not count yet: a hidden directory, which one rename publishes."""

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self.token = token
        """Other ranks `join` with it."""
        self.records: dict[str, FileRecord] = {}
        """Size and hash of the files that this process has created."""

    def create(self, name: str) -> AbstractContextManager[HashedFile]:
        """Return a new file; when the block ends it is on stable storage and has a record."""
        return hashed_file(self.path / name, self.records)

    def read(self, name: str) -> Reader:
        """Open a file that any rank has created."""
        return LocalReader(self.path / name)

    def drop(self, name: str) -> None:
        """Remove a file that is not part of the checkpoint after all."""
        (self.path / name).unlink()
        self.records.pop(name, None)

    def publish(self, manifest: Manifest) -> str:
        """Write the manifest, the last file, and make this a checkpoint; return its name."""
        with hashed_file(self.path / MANIFEST, {}) as file:
            file.write(dump_manifest(manifest).encode())
        return publish(self.path, step=manifest.step, run_id=manifest.run_id).name

    def discard(self) -> None:
        """Remove everything, after all ranks have stopped writing; what cannot be removed is left for a later save."""
        shutil.rmtree(self.path, ignore_errors=True)


class Storage:
    """A directory of checkpoints: a folder that all ranks see."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def begin(self, step: int) -> Draft:
        """Start a checkpoint of this step, after removing what failed saves left."""
        make_private(self.directory)
        clear_leftovers(self.directory, older_than=time.time())
        token = writing_name(step)
        (self.directory / token).mkdir()
        return Draft(self.directory / token, token)

    def join(self, token: str) -> Draft:
        """Return the unfinished checkpoint that another rank has begun; FileNotFoundError where it is not visible."""
        (self.directory / token).stat()
        return Draft(self.directory / token, token)

    def resume_copy(self, token: str, name: str) -> Draft:
        """Return the unfinished copy of a checkpoint, which may hold files already."""
        make_private(self.directory)
        (self.directory / token).mkdir(exist_ok=True)
        return Draft(self.directory / token, token)

    def names(self) -> list[str]:
        """Return the names of the entries, checkpoints and others."""
        try:
            return sorted(path.name for path in self.directory.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def path(self, name: str) -> Path:
        """Return how a user names an entry."""
        return self.directory / name

    def read(self, name: str, file: str) -> bytes:
        """Return the content of a small file."""
        with open_regular(self.directory / name / file) as stream:
            return stream.read()

    def open(self, name: str, file: str) -> Reader:
        """Open a file of a checkpoint for reading; OSError where it cannot be read."""
        return LocalReader(self.directory / name / file)

    def size(self, name: str, file: str) -> int:
        """Return the size of a file in bytes; FileNotFoundError where it does not exist."""
        return (self.directory / name / file).stat().st_size

    def put(self, name: str, file: str, data: bytes | memoryview) -> None:
        """Write a small file as a whole, on stable storage when this returns; `name` is created where it is missing."""
        folder = self.directory / name
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_directory(folder.parent)
        with replacing(folder / file, flush=True) as stream:
            stream.write(data)

    def list(self, name: str) -> list[str]:
        """Return the files of an entry; none of a link: what is listed may be removed, and is elsewhere."""
        folder = self.directory / name
        return [] if folder.is_symlink() else Storage(folder).names()

    def delete(self, name: str, file: str) -> None:
        """Remove one file, if it exists."""
        (self.directory / name / file).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a checkpoint; after a failure in the middle nothing that looks like a checkpoint remains."""
        remove(self.directory / name)


def check_writable(directory: Path | str) -> None:
    """Check before training that checkpoints can be written: create the directory, and a file in it."""
    directory = as_path(directory)
    if isinstance(directory, RemotePath):
        if directory.protocol == "memory" and collectives.world_size() > 1:
            raise CheckpointError(
                f"checkpoint_dir is {directory}, the memory of one process, and there are "
                f"{collectives.world_size()} ranks",
                hint="Set checkpoint_dir to a folder, or to a URL that all ranks reach: s3://bucket/folder",
            )
        directory.check_writable()
        return
    probe = directory / f".probe-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        make_private(directory)
        try:
            with probe.open("xb") as file:
                file.write(b"phalanx")
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise not_a_directory(directory) from None
    except OSError as error:
        raise write_failed(error, rank=collectives.rank(), path=directory, needed=0) from error


def not_a_directory(directory: Path) -> CheckpointError:
    """Return the error for a checkpoint_dir that is a file, or below one."""
    culprit = next((path for path in (directory, *directory.parents) if path.exists()), directory)
    return CheckpointError(
        f"checkpoint_dir is {directory}, but {culprit} is a file",
        hint="Set checkpoint_dir to a directory; it is created when it does not exist.",
    )
