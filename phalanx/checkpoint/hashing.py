"""A hash that several cores compute together.

One BLAKE2b reads about half a gigabyte a second, less than a disk writes. So a file is cut into leaves of 4 MiB, which
are hashed side by side (hashlib releases the interpreter lock), and the file's hash is that of its leaves' hashes in
order.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

LEAF_BYTES = 4 << 20
_THREADED_BYTES = 64 << 10
_LEAF_DIGEST_BYTES = 64
_DIGEST_BYTES = 32


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
        """Start hashing a piece; its buffer must live, and nothing more may come, until the futures are done."""
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

    def hexdigest(self) -> str:
        """Return the hash of everything so far."""
        return _root([leaf.digest() for leaf in self._leaves])


def hash_file(path: Path) -> str:
    """Return the hash of a file's content, several leaves at a time."""
    with path.open("rb", buffering=0) as file, hashing_threads() as threads:
        descriptor = file.fileno()
        offsets = range(0, max(1, os.fstat(descriptor).st_size), LEAF_BYTES)
        return _root(list(threads.map(lambda offset: _hash_leaf(descriptor, offset), offsets)))


def _hash_leaf(descriptor: int, offset: int) -> bytes:
    leaf = _new_leaf()
    end = offset + LEAF_BYTES
    # A read may bring less than was asked for; only an empty one is the end.
    while offset < end and (piece := os.pread(descriptor, end - offset, offset)):
        leaf.update(piece)
        offset += len(piece)
    return leaf.digest()


def _new_leaf() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_LEAF_DIGEST_BYTES)


def _root(digests: list[bytes]) -> str:
    return hashlib.blake2b(b"".join(digests), digest_size=_DIGEST_BYTES, person=b"phalanx-tree-v1").hexdigest()
