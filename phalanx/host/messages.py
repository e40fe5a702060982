"""Messages between the processes of one node: JSON over a Unix socket that keeps message boundaries.

The JSON travels in an anonymous memory file whose descriptor rides along, so a message may be of any size (an
environment easily outgrows a socket buffer). Further descriptors (pipes, logs) ride behind it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Message = dict[str, Any]

_MAX_DESCRIPTORS = 16


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Make two connected ends; a message sent into one comes out of the other whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Message, descriptors: Sequence[int] = (), *, wait: bool = True) -> None:
    """Send one message with copies of `descriptors`; without `wait` BlockingIOError says that the other end is full."""
    body = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        with open(body, "wb", closefd=False) as file:
            file.write(json.dumps(message).encode())
        rides = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [body, *descriptors]))
        end.sendmsg([b"+"], [rides], 0 if wait else socket.MSG_DONTWAIT)  # `socket.send_fds` drops the flags
    finally:
        os.close(body)


class Outbox:
    """Messages to a process that may be sending, too: none of the two ends waits until the other one reads."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._waiting: deque[Message] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether all messages are sent; else `flush` has to be called again."""
        return not self._waiting

    def send(self, message: Message) -> None:
        """Send a message now, or as soon as there is room."""
        self._waiting.append(message)
        self.flush()

    def flush(self) -> None:
        """Send what fits; OSError if the other end has closed."""
        with contextlib.suppress(BlockingIOError):
            while self._waiting:
                send(self._end, self._waiting[0], wait=False)
                self._waiting.popleft()


def receive(end: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors (now owned by the caller), or None when the other end has closed."""
    try:
        data, descriptors, _, _ = socket.recv_fds(end, 1, _MAX_DESCRIPTORS)
    except ConnectionResetError:
        return None
    if not data:
        return None
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    body, *others = descriptors
    with open(body, "rb") as file:
        # The sender's offset is shared: it stands at the end of what was written.
        file.seek(0)
        message: Message = json.loads(file.read())
    return message, others


def read_available(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Yield what a non-blocking read returns until it would block, or the other end has closed."""
    with contextlib.suppress(BlockingIOError):
        while data := read():
            yield data
