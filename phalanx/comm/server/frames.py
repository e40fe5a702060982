"""Messages between workers and shards: a fixed header, a little JSON, then raw bytes of tensors.

Nothing that arrives is ever unpickled. Bytes go from a tensor's memory into the socket and from the socket into a
tensor's memory: there is no copy between.
"""

from __future__ import annotations

import ctypes
import json
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from phalanx.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_HEADER = struct.Struct("!4sBxxxIQQ")
_MAGIC = b"phx1"
_MAX_META = 16 << 20
"""Descriptions of many thousands of pieces fit; a caller cannot make a shard reserve more by announcing more."""
_JOINED_BYTES = 64 << 10
"""Up to here one copy is cheaper than several system calls."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
"""A machine that lost its power sends no end of file: it counts as gone after about ten seconds of silence."""


class Kind(IntEnum):
    """What a message asks for, or that it answers."""

    HELLO = 1
    PUSH = 2
    NORM = 3
    COMMIT = 4
    PULL = 5
    FETCH = 6
    LOAD = 7
    STATS = 8
    REPLACE = 9
    COSTS = 10
    REPLY = 20
    ERROR = 21


@dataclass(frozen=True)
class Head:
    """A message before its bytes are read."""

    kind: Kind
    seq: int
    meta: dict[str, Any]
    payload: int
    size: int
    """Bytes on the wire, all parts together."""


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice a peer that fell silent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; it must outlive the view."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("only contiguous CPU tensors have one run of bytes")
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def send(
    connection: socket.socket, kind: Kind, seq: int, meta: dict[str, Any], buffers: Sequence[memoryview] = ()
) -> int:
    """Send one message; return its bytes."""
    body = json.dumps(meta, separators=(",", ":")).encode()
    payload = sum(buffer.nbytes for buffer in buffers)
    head = _HEADER.pack(_MAGIC, kind, len(body), seq, payload) + body
    if payload <= _JOINED_BYTES:
        connection.sendall(b"".join((head, *buffers)))
    else:
        connection.sendall(head)
        for buffer in buffers:
            connection.sendall(buffer)
    return len(head) + payload


def receive(connection: socket.socket) -> Head:
    """Read a message up to its bytes; EOFError where the other side is gone."""
    magic, kind, length, seq, payload = _HEADER.unpack(receive_exactly(connection, _HEADER.size))
    if magic != _MAGIC or length > _MAX_META:
        raise ServerError("a message in another form than ours arrived")
    meta = json.loads(receive_exactly(connection, length)) if length else {}
    return Head(Kind(kind), seq, meta, payload, _HEADER.size + length + payload)


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Read so many bytes."""
    data = bytearray(count)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill memory from the socket; EOFError where the other side is gone."""
    done = 0
    while done < view.nbytes:
        count = connection.recv_into(view[done:])
        if count == 0:
            raise EOFError("the other side has closed the connection")
        done += count
