"""Files that are hashed while they are written and flushed to the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from phalanx.checkpoint.hashing import TreeHash, hashing_threads
from phalanx.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of a file."""

    size: int
    hash: str
    """As `hashing.TreeHash` computes it."""


class HashedFile:
    """A new file whose hash is computed on other cores while it is written.

    Errors of `write` wait for `flush` or `finish`: torch's zip writer aborts the process when its callback raises.
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
        self.size += view.nbytes
        if self._error is None:
            pending = self._hash.begin(view)
            try:
                self._file.write(view)
            except OSError as error:
                self._error = error
            for part in pending:  # The buffer is only ours until we return.
                part.result()
        return view.nbytes

    def tell(self) -> int:
        """Return the position, which is always the end."""
        return self.size

    def flush(self) -> None:
        """Raise what an earlier write ran into."""
        if self._error is not None:
            raise self._error

    def finish(self) -> FileRecord:
        """Put every byte on the disk and return the file's record."""
        self.flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(self.size, self._hash.hexdigest())

    def close(self) -> None:
        """Do nothing yet: torch closes its streams before they could be finished."""

    def release(self) -> None:
        """Release the file and the hashing thread; a file that was not finished may be incomplete."""
        self._threads.shutdown()
        # A full disk makes close() fail a second time with the error that finish() has already raised.
        with contextlib.suppress(OSError):
            self._file.close()


@contextlib.contextmanager
def hashed_file(path: Path, records: dict[str, FileRecord]) -> Iterator[HashedFile]:
    """Open a new file for hashed writing; its record is filed under its name once it is safely on the disk."""
    file = HashedFile(path)
    try:
        yield file
        records[path.name] = file.finish()
    finally:
        file.release()


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading; a pipe or device of that name, which could block for ever, is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def sync_directory(path: Path) -> None:
    """Put a directory's entries on the disk: without this a rename may be lost in a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some network file systems cannot, and need not.
            raise
    finally:
        os.close(descriptor)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_failed(error: OSError, *, rank: int, path: Path, needed: int) -> CheckpointError:
    """Say who could not write what and why; where room is the cause, how much of it there is."""
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        reason += f" ({readable_size(_free_bytes(path))} free, {readable_size(needed)} needed by this rank)"
    return CheckpointError(f"rank {rank} could not write {path}: {reason}", hint=_remedy(error.errno))


def readable_size(count: int) -> str:
    """Write a number of bytes the way people read it."""
    if count < 1000:
        return f"{count} bytes"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def _free_bytes(path: Path) -> int:
    for place in (path, *path.parents):
        if place.exists():
            return shutil.disk_usage(place).free
    return 0


def _remedy(code: int | None) -> str:
    if code in _NO_ROOM:
        return "Free some space, keep fewer checkpoints with keep_last=2, or set checkpoint_dir to a larger disk."
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Set checkpoint_dir to a directory that you may write to."
    return "Set checkpoint_dir to another directory, or mend this one, and resume from the previous checkpoint."
