"""Small files written as a whole, and folders that only their owner can open."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from phalanx.host.remote import RemotePath


@contextlib.contextmanager
def replacing(path: Path, *, flush: bool = False) -> Iterator[BinaryIO]:
    """Open a new file next to `path` for writing, and rename it to `path` when the block ends without an error.

    `flush` waits until the disk has the content and the new name, so that a power failure loses neither.
    """
    # By chance and not by process id: those of two containers that share a folder may be equal.
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        with fresh.open("xb") as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if flush:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write `path` as a whole, also at a URL."""
    if isinstance(path, RemotePath):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_private(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder, with its parents, that only its owner can open; one that exists keeps its permissions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)
