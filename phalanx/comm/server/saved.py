"""A shard's state on disk: written beside the old one, hashed, flushed, then renamed over it."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from typing import TYPE_CHECKING, Any

from phalanx.comm.server.bundle import Bundle
from phalanx.comm.server.frames import ServerError, bytes_of

if TYPE_CHECKING:
    from pathlib import Path

_LENGTH = struct.Struct("!QQ")
_DIGEST = 32


def save_shard(path: Path, meta: dict[str, Any], bundle: Bundle) -> None:
    """Publish a state: after a crash at any moment the old one or the new one is there, whole."""
    head = json.dumps({**meta, **bundle.describe()}).encode()
    buffers = bundle.buffers()
    parts: list[bytes | memoryview] = [
        _LENGTH.pack(len(head), sum(buffer.nbytes for buffer in buffers)),
        head,
        *buffers,
    ]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    _flush_folder(path.parent)


def load_shard(path: Path) -> tuple[dict[str, Any], Bundle] | None:
    """Return the state that was saved last, or None where there is none; ServerError for a damaged one."""
    if not path.exists():
        return None
    digest = hashlib.blake2b(digest_size=_DIGEST)
    with path.open("rb") as file:
        lengths = file.read(_LENGTH.size)
        if len(lengths) != _LENGTH.size:
            raise ServerError(f"{path} is cut off")
        head_length, payload = _LENGTH.unpack(lengths)
        if _LENGTH.size + head_length + payload + _DIGEST != path.stat().st_size:
            raise ServerError(f"{path} is not as long as it says")
        head = file.read(head_length)
        digest.update(lengths)
        digest.update(head)
        meta: dict[str, Any] = json.loads(head)
        bundle = Bundle.allocate(meta, payload)
        for tensor in bundle.tensors.values():
            view = bytes_of(tensor)
            if view.nbytes:
                file.readinto(view)
            digest.update(view)
        if file.read(_DIGEST) != digest.digest():
            raise ServerError(f"{path} is damaged: its bytes do not give the hash that it carries")
    return meta, bundle


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
