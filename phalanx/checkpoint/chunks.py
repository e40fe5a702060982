"""Incremental checkpoints: leaves as files named by their hash, so that only changed ones are written.

Each run has its own folder of chunks: a run that shares the directory cannot remove what another is about to use.
A chunk is on the disk before an index names it, and is removed only when no published checkpoint names it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from phalanx.checkpoint.lock import safe_name
from phalanx.checkpoint.storage import Storage

_PREFIX = ".chunks-"


def folder_of(run_id: str) -> str:
    """Return the entry of the checkpoint directory with a run's chunks."""
    return f"{_PREFIX}{safe_name(run_id)[:32]}"


def location(folder: str, digest: str) -> tuple[str, str]:
    """Return the entry and the file of a chunk."""
    return f"{folder}/{digest[:2]}", digest


def write(
    storage: Storage,
    folder: str,
    data: memoryview,
    cuts: list[tuple[int, int]],
    saved: set[str],
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[tuple[int, int, str]], int]:
    """Write the leaves that are not there yet; return (start, size, hash) of all, and the bytes that were written.

    `saved`: the hashes of the last save, which are there; replaced by those of this one. `advance`: called before each
    leaf; it may raise.
    """

    begun: set[str] = set()
    lock = threading.Lock()

    def one(cut: tuple[int, int]) -> tuple[str, int]:
        advance()
        start, size = cut
        part = data[start : start + size]
        digest = hashlib.sha256(part).hexdigest()
        with lock:  # leaves with equal content, such as zeros, are one chunk, which one thread writes
            if digest in saved or digest in begun:
                return digest, 0
            begun.add(digest)
        if is_whole(storage, folder, digest, size):
            return digest, 0
        storage.put(*location(folder, digest), part)
        return digest, size

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="phalanx-chunks") as threads:
        done = list(threads.map(one, cuts))
    saved.clear()
    saved.update(digest for digest, _ in done)
    leaves = [(start, size, digest) for (start, size), (digest, _) in zip(cuts, done, strict=True)]
    return leaves, sum(size for _, size in done)


def is_whole(storage: Storage, folder: str, digest: str, size: int, *, deep: bool = True) -> bool:
    """Whether a chunk exists with its size and, with `deep`, its content."""
    try:
        if storage.size(*location(folder, digest)) != size:
            return False
        return not deep or hashlib.sha256(storage.read(*location(folder, digest))).hexdigest() == digest
    except OSError:  # missing, or cannot be read
        return False


def prune(storage: Storage, folder: str, used: Iterable[str]) -> None:
    """Remove the chunks of a folder that are not used, and the remains of interrupted writes; all of it without any."""
    keep = set(used)
    listed = storage.list(folder)
    if listed and not keep:
        storage.remove(folder)
        return
    for first in listed:
        for name in storage.list(f"{folder}/{first}"):
            if name not in keep:
                storage.delete(f"{folder}/{first}", name)


def is_folder(name: str) -> bool:
    """Whether an entry of a checkpoint directory has the chunks of a run."""
    return name.startswith(_PREFIX)
