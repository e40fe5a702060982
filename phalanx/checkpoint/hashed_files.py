"""Files of a checkpoint: written and hashed in one pass, by several threads; errors of the disk with a remedy."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from phalanx.errors import CheckpointError
from phalanx.host.remote import RemotePath

LEAF_BYTES = 4 << 20
_THREADED_BYTES = 64 << 10


def hashing_threads() -> ThreadPoolExecutor:
    """Return a pool for hashing; its threads start when they are first needed."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="phalanx-hash")


class TreeHash:
    """The hash of bytes that arrive in pieces."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._leaves = [_new_leaf()]
        self._room = LEAF_BYTES

    def begin(self, piece: memoryview) -> list[Future[None]]:
        """Start hashing a piece; its buffer must stay, and no other piece may follow, until the futures are done."""
        pending = []
        start = 0
        while start < piece.nbytes:
            if self._room == 0:
                self._leaves.append(_new_leaf())
                self._room = LEAF_BYTES
            part = piece[start : start + self._room]
            if part.nbytes >= _THREADED_BYTES:
                pending.append(self._threads.submit(self._leaves[-1].update, part))
            else:
                self._leaves[-1].update(part)
            start += part.nbytes
            self._room -= part.nbytes
        return pending

    def record(self, size: int) -> FileRecord:
        """Return the record of a file with everything so far."""
        digests = [leaf.digest() for leaf in self._leaves]
        return FileRecord(size, _root(digests), tuple(digest.hex() for digest in digests))


def hash_file(path: Path) -> str:
    """Return the hash of a file's content, several leaves at a time."""
    if isinstance(path, RemotePath):
        remote, offsets = path, range(0, max(1, path.stat().st_size), LEAF_BYTES)
        with hashing_threads() as threads:
            return _root(list(threads.map(lambda offset: _hash_remote_leaf(remote, offset), offsets)))
    with open_regular(path) as file, hashing_threads() as threads:
        descriptor = file.fileno()
        offsets = range(0, max(1, os.fstat(descriptor).st_size), LEAF_BYTES)
        return _root(list(threads.map(lambda offset: _hash_leaf(descriptor, offset), offsets)))


def _hash_leaf(descriptor: int, offset: int) -> bytes:
    leaf = _new_leaf()
    end = offset + LEAF_BYTES
    # A read may return less than requested; only an empty one is the end.
    while offset < end and (piece := os.pread(descriptor, end - offset, offset)):
        leaf.update(piece)
        offset += len(piece)
    return leaf.digest()


def _hash_remote_leaf(path: RemotePath, offset: int) -> bytes:
    leaf = _new_leaf()
    leaf.update(path.read_range(offset, offset + LEAF_BYTES))
    return leaf.digest()


def _new_leaf() -> hashlib._Hash:
    return hashlib.sha256()  # processors have instructions for it: 2.6 times as fast as blake2b


def _root(digests: list[bytes]) -> str:
    return hashlib.sha256(b"phalanx-tree-v2" + b"".join(digests)).hexdigest()


def hash_bytes(data: bytes) -> str:
    """Return the hash of a file with this content."""
    view = memoryview(data)
    offsets = range(0, max(1, len(data)), LEAF_BYTES)
    return _root([hashlib.sha256(view[at : at + LEAF_BYTES]).digest() for at in offsets])


_BUFFER_BYTES = 1 << 20
_PIECE_BYTES = 16 << 20


def _start_flushing(descriptor: int, offset: int) -> None:
    """Have the kernel write what is behind `offset` to the disk now: otherwise it waits for fsync."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, _PIECE_BYTES, os.POSIX_FADV_DONTNEED)


class Leaf(NamedTuple):
    """A range of a data file with its hash."""

    start: int
    size: int
    hash: str


@dataclass(frozen=True)
class FileRecord:
    """Size and hash (`TreeHash`) of a file in the manifest."""

    size: int
    hash: str
    leaves: tuple[str, ...] = field(default=(), compare=False)
    """The hashes of its leaves of `LEAF_BYTES` each, which only the index stores."""

    def cut(self) -> list[Leaf]:
        """Return its leaves with their places."""
        starts = range(0, max(1, self.size), LEAF_BYTES)
        return [
            Leaf(start, min(LEAF_BYTES, self.size - start), digest)
            for start, digest in zip(starts, self.leaves, strict=True)
        ]


class HashedFile:
    """A new file whose hash is computed on other cores while it is written.

    Errors of `write` are raised by `flush` or `finish`: torch's zip writer aborts the process when its callback raises.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._error: OSError | None = None
        self._file = path.open("xb", buffering=_BUFFER_BYTES)
        self._threads = hashing_threads()
        self._hash = TreeHash(self._threads)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes and hash them; both release the interpreter lock, so large pieces overlap."""
        view = memoryview(data).cast("B")
        pending = [] if self._error is not None else self._hash.begin(view)
        try:
            for start in range(0, view.nbytes if self._error is None else 0, _PIECE_BYTES):
                self._append(view[start : start + _PIECE_BYTES], self.size + start)
        except OSError as error:
            self._error = error
        self.size += view.nbytes
        for part in pending:  # the buffer is valid only until this returns
            part.result()
        return view.nbytes

    def _append(self, piece: memoryview, offset: int) -> None:
        self._file.write(piece)
        if piece.nbytes == _PIECE_BYTES:
            _start_flushing(self._file.fileno(), offset)

    def tell(self) -> int:
        """Return the position, which is always the end."""
        return self.size

    def flush(self) -> None:
        """Raise the error of an earlier write."""
        if self._error is not None:
            raise self._error

    def finish(self) -> FileRecord:
        """Flush the file to the disk and return its record."""
        self.flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._hash.record(self.size)

    def close(self) -> None:
        """Do nothing: torch closes its streams before `finish`."""

    def release(self) -> None:
        """Release the file and the hashing thread; a file that was not finished may be incomplete."""
        self._threads.shutdown()
        # A full disk makes close() fail a second time with the error that finish() has already raised.
        with contextlib.suppress(OSError):
            self._file.close()


@contextlib.contextmanager
def hashed_file(
    path: Path, records: dict[str, FileRecord], kind: type[HashedFile] = HashedFile
) -> Iterator[HashedFile]:
    """Open a new file for hashed writing; add its record to `records` by name when it is on stable storage."""
    file = kind(path)
    try:
        yield file
        records[path.name] = file.finish()
    finally:
        file.release()


_NAME = re.compile(r"index\.json|state\.safetensors|shard-[0-9]{5,9}\.safetensors|rank-[0-9]{5,9}\.pt")


def checked_name(name: Any) -> str:
    """Return a file's name that was read from a checkpoint; ValueError for one that Phalanx does not write.

    Paths are built from it, also to write and to remove: it must neither lead out of the folder nor name the manifest.
    """
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise ValueError(f"it lists the file {str(name)[:200]!a}, which is not a name that a checkpoint's files have")


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading; OSError for a pipe or device, which could block for ever, and for a symbolic link.

    A checkpoint has none: a link in one from another user would make a copy of it carry a file of this user's.
    """
    if isinstance(path, RemotePath):
        return io.BytesIO(path.read_bytes())
    if path.is_symlink():
        raise OSError(errno.EINVAL, "a symbolic link, not a regular file", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk: otherwise a rename may be lost in a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not support it
            raise
    finally:
        os.close(descriptor)


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_failed(error: OSError, *, rank: int, path: Path, needed: int) -> CheckpointError:
    """Return the error of a failed write, with a remedy; where space is missing, also how much."""
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        existing = next((folder for folder in (path, *path.parents) if folder.exists()), None)
        free = shutil.disk_usage(existing).free if existing is not None else 0
        reason += f" ({readable_size(free)} free, {readable_size(needed)} needed by this rank)"
        hint = "Free some space, keep fewer checkpoints with keep_last=2, or set checkpoint_dir to a larger disk."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Set checkpoint_dir to a directory that you may write to."
    else:
        hint = "Set checkpoint_dir to another directory, or repair this one, and resume from the previous checkpoint."
    return CheckpointError(f"rank {rank} could not write {path}: {reason}", hint=hint)


def readable_size(count: int) -> str:
    """Return a number of bytes in a readable unit."""
    if count < 1000:
        return f"{count} bytes"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
