"""The wire protocol of parameter servers: a fixed header, a little JSON, then raw bytes of tensors.

Nothing that arrives is ever unpickled. Bytes go from a tensor's memory into the socket and from the socket into a
tensor's memory without a copy. A connection starts with a handshake: both sides prove that they know the job's token
without sending it.
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
"""Descriptions of many thousands of pieces fit; a caller cannot make a shard reserve more by announcing more."""
_JOINED_BYTES = 64 << 10
"""Up to here one copy is cheaper than several system calls."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
"""A machine that lost its power sends no end of file: it counts as gone after about ten seconds of silence."""


class FrameKind(IntEnum):
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

    kind: FrameKind
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
    connection: socket.socket, kind: FrameKind, seq: int, meta: dict[str, Any], buffers: Sequence[memoryview] = ()
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
    return Head(FrameKind(kind), seq, meta, payload, _HEADER.size + length + payload)


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


_NONCE = 32
_PROOF = 32
_REFUSED = bytes(_PROOF)
"""Said in words, so that a shard that dies in the middle is not taken for one that refuses."""
SECONDS = 5.0
"""How long the whole handshake may take: a caller without the token must not hold a thread longer."""


def greet(connection: socket.socket, token: str) -> None:
    """A shard's side: challenge the caller, and prove itself; ServerError for a stranger."""
    deadline = time.monotonic() + SECONDS
    connection.settimeout(SECONDS)
    challenge = secrets.token_bytes(_NONCE)
    connection.sendall(challenge)
    answer = _receive_before(deadline, connection, _NONCE + _PROOF)
    own, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _prove(token, b"worker", challenge + own)):
        connection.sendall(_REFUSED)
        raise ServerError("a caller does not know this job's token")
    connection.sendall(_prove(token, b"shard", challenge + own))
    connection.settimeout(None)


def introduce(connection: socket.socket, token: str) -> None:
    """A worker's side: answer the challenge, and demand the same proof."""
    deadline = time.monotonic() + SECONDS
    connection.settimeout(SECONDS)
    challenge = _receive_before(deadline, connection, _NONCE)
    own = secrets.token_bytes(_NONCE)
    connection.sendall(own + _prove(token, b"worker", challenge + own))
    proof = _receive_before(deadline, connection, _PROOF)
    if proof == _REFUSED:
        raise ServerError(
            "the parameter server refused this worker's token", hint="Give all workers and shards of a job one token."
        )
    if not hmac.compare_digest(proof, _prove(token, b"shard", challenge + own)):
        raise ServerError("what listens at the parameter server's address does not know this job's token")
    connection.settimeout(None)


def _receive_before(deadline: float, connection: socket.socket, count: int) -> bytes:
    """Read so many bytes; TimeoutError at the deadline, however slowly they trickle in."""
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
