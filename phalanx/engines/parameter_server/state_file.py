"""A shard's saved state, which stays readable after a failure at any moment."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.engines.parameter_server.bundle import Bundle
from phalanx.engines.parameter_server.protocol import bytes_of
from phalanx.errors import ServerError
from phalanx.host.files import replacing

_LENGTH = struct.Struct("!QQ")
_DIGEST = 32


class StateFile:
    """A file that is replaced atomically: written under another name, hashed, flushed to the disk, then renamed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, meta: dict[str, Any], bundle: Bundle) -> None:
        """Replace the saved state."""
        with replacing(self._path, flush=True) as file:
            _write(file, meta, bundle)

    def load(self) -> tuple[dict[str, Any], Bundle] | None:
        """Return the last saved state, or None where there is none; ServerError for a damaged one."""
        if not self._path.exists():
            return None
        with self._path.open("rb") as file:
            return _read(file, str(self._path))


class StateSlots:
    """Two unnamed files, written in turns, that a shard inherits and that end with the process that made them.

    After a failure while one is being written, the other one is complete.
    """

    def __init__(self) -> None:
        self._slots: list[BinaryIO] = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - see close
        self._serial = 0

    @property
    def descriptors(self) -> set[int]:
        """The file descriptors that a child must not close."""
        return {slot.fileno() for slot in self._slots}

    def save(self, meta: dict[str, Any], bundle: Bundle) -> None:
        """Write a state over the older one."""
        slot = self._slots[(self._serial + 1) % 2]
        slot.seek(0)
        slot.truncate()
        _write(slot, {**meta, "serial": self._serial + 1}, bundle)
        self._serial += 1

    def load(self) -> tuple[dict[str, Any], Bundle] | None:
        """Return the newest complete state, or None where nothing has been saved."""
        found = []
        for slot in self._slots:
            slot.seek(0)
            with contextlib.suppress(ServerError):  # empty or incomplete: the other one is used
                found.append(_read(slot, "a slot"))
        newest = max(found, key=lambda state: state[0]["serial"], default=None)
        self._serial = 0 if newest is None else newest[0]["serial"]
        return newest

    def close(self) -> None:
        """Close the files, which frees their space."""
        for slot in self._slots:
            slot.close()


def _write(file: BinaryIO, meta: dict[str, Any], bundle: Bundle) -> None:
    head = json.dumps({**meta, **bundle.describe()}).encode()
    buffers = bundle.buffers()
    lengths = _LENGTH.pack(len(head), sum(buffer.nbytes for buffer in buffers))
    parts: list[bytes | memoryview] = [lengths, head, *buffers]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
        file.write(part)
    file.write(digest.digest())
    file.flush()


def _read(file: BinaryIO, name: str) -> tuple[dict[str, Any], Bundle]:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    lengths = file.read(_LENGTH.size)
    if len(lengths) != _LENGTH.size:
        raise ServerError(f"{name} is cut off")
    head_length, payload = _LENGTH.unpack(lengths)
    if _LENGTH.size + head_length + payload + _DIGEST != os.fstat(file.fileno()).st_size:
        raise ServerError(f"{name} does not have the length in its header")
    head = file.read(head_length)
    meta: dict[str, Any] = json.loads(head)
    bundle = Bundle.allocate(meta, payload)
    digest.update(lengths)
    digest.update(head)
    for tensor in bundle.tensors.values():
        view = bytes_of(tensor)
        file.readinto(view)  # type: ignore[attr-defined]
        digest.update(view)
    if file.read(_DIGEST) != digest.digest():
        raise ServerError(f"{name} is damaged: its hash does not match")
    return meta, bundle
