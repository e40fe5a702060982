"""The protocol of parameter servers: a fixed header, JSON, then raw bytes of tensors; nothing is ever unpickled.

Tensors are sent from their memory and received into it without a copy. A connection starts with a handshake in which
both sides prove that they know the job's token without sending it.
"""

from __future__ import annotations

import ctypes
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from phalanx.errors import ServerError

_HEADER = struct.Struct("!4sBxxxIQQ")
_MAGIC = b"phx1"
_MAX_META = 16 << 20
"""Enough for many thousands of pieces; a larger announcement is refused before memory is allocated."""
_JOINED_BYTES = 64 << 10
"""Up to this size one copy is cheaper than several system calls."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
"""A node without power sends no end of file: its connection fails after about ten seconds."""


class FrameKind(IntEnum):
    """The kind of a message: a request, or an answer."""

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
    """A message before its payload is read."""

    kind: FrameKind
    seq: int
    meta: dict[str, Any]
    payload: int
    size: int
    """Bytes of header, JSON and payload together."""


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and detect a silent peer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name that was received; ValueError for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; it must outlive the view."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("only a contiguous CPU tensor is one block of memory")
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def send(
    connection: socket.socket, kind: FrameKind, seq: int, meta: dict[str, Any], buffers: Sequence[memoryview] = ()
) -> int:
    """Send one message; return its size."""
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
    """Read a message up to its payload; EOFError where the other side has closed the connection."""
    header = bytearray(_HEADER.size)
    receive_into(connection, memoryview(header))
    magic, kind, length, seq, payload = _HEADER.unpack(header)
    if magic != _MAGIC or length > _MAX_META:
        raise ServerError("a message in an unknown format arrived")
    meta = bytearray(length)
    receive_into(connection, memoryview(meta))
    parsed = json.loads(meta) if length else {}
    return Head(FrameKind(kind), seq, parsed, payload, _HEADER.size + length + payload)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill memory from the socket; EOFError where the other side has closed the connection."""
    done = 0
    while done < view.nbytes:
        count = connection.recv_into(view[done:])
        if count == 0:
            raise EOFError("the other side has closed the connection")
        done += count


_NONCE = 32
_PROOF = 32
_REFUSED = bytes(_PROOF)
"""Sent explicitly, to distinguish a refusal from a shard that fails during the handshake."""
SECONDS = 5.0
"""How long the whole handshake may take: a client without the token must not occupy a thread longer."""


def greet(connection: socket.socket, token: str) -> None:
    """Do a shard's side of the handshake; ServerError where the client does not know the token."""
    deadline = time.monotonic() + SECONDS
    connection.settimeout(SECONDS)
    challenge = secrets.token_bytes(_NONCE)
    connection.sendall(challenge)
    answer = _receive_before(deadline, connection, _NONCE + _PROOF)
    nonce, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _prove(token, b"worker", challenge + nonce)):
        connection.sendall(_REFUSED)
        raise ServerError("a client does not know this job's token")
    connection.sendall(_prove(token, b"shard", challenge + nonce))
    connection.settimeout(None)


def introduce(connection: socket.socket, token: str) -> None:
    """Do a worker's side of the handshake: answer the challenge, and check the shard's proof."""
    deadline = time.monotonic() + SECONDS
    connection.settimeout(SECONDS)
    challenge = _receive_before(deadline, connection, _NONCE)
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(nonce + _prove(token, b"worker", challenge + nonce))
    proof = _receive_before(deadline, connection, _PROOF)
    if proof == _REFUSED:
        raise ServerError(
            "the parameter server refused this worker's token", hint="Give all workers and shards of a job one token."
        )
    if not hmac.compare_digest(proof, _prove(token, b"shard", challenge + nonce)):
        raise ServerError("the process at the parameter server's address does not know this job's token")
    connection.settimeout(None)


def _receive_before(deadline: float, connection: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes; TimeoutError at the deadline, also if bytes arrive slowly."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError("the other side has closed the connection")
        data += piece
    return data


def _prove(token: str, side: bytes, challenges: bytes) -> bytes:
    return hmac.digest(token.encode(), side + challenges, "sha256")
