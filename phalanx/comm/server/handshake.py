"""Who may talk to a shard: both sides show that they know the job's token, without sending it."""

from __future__ import annotations

import hmac
import secrets
import time
from typing import TYPE_CHECKING

from phalanx.errors import ServerError

if TYPE_CHECKING:
    import socket

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
