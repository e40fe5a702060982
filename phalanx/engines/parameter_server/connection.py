"""A worker's connection to one shard; after a failure it reconnects and repeats what was not acknowledged."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from phalanx.engines.parameter_server.protocol import SECONDS, FrameKind, Head, introduce, receive, send, tune
from phalanx.errors import ServerError

_log = logging.getLogger("phalanx.server")
_Result = TypeVar("_Result")
_PAUSE_SECONDS = 0.05


class ServerConnection:
    """One connection, and the pushes of the current step that are not acknowledged yet."""

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        placement: str,
        worker: int,
        patience: float,
        timeout: float | None = None,
    ) -> None:
        self.address = address
        self.bytes_out = 0
        self.bytes_in = 0
        self.lost_updates = 0
        self.clock = 0
        self.start = 0
        self._token = token
        self.hello: dict[str, Any] = {"worker": worker, "placement": placement, "passed": None}
        """What is sent after each connect; `placement` is the digest that the shard must have."""
        self.patience = patience
        self._timeout = timeout
        self._abandoned = False
        self._pushed: list[tuple[int, dict[str, Any], Sequence[memoryview], Any]] = []
        self._socket: socket.socket | None = None
        self.reconnect(None)

    def push(self, seq: int, meta: dict[str, Any], buffers: Sequence[memoryview], alive: Any) -> None:
        """Send gradients; `alive` keeps their memory until the step is acknowledged, in case they are sent again."""
        self._pushed.append((seq, meta, buffers, alive))
        try:
            self._send(FrameKind.PUSH, seq, meta, buffers)
        except OSError as error:
            self.reconnect(error)  # sends all pushes of this step again, this one included

    def ask(
        self,
        kind: FrameKind,
        seq: int,
        meta: dict[str, Any],
        read: Callable[[socket.socket, Head], _Result],
        buffers: Sequence[memoryview] = (),
    ) -> _Result:
        """Send a request and read its answer; retry on a new connection where the old one was lost."""
        while True:
            try:
                self._send(kind, seq, meta, buffers)
                return self.answer(read)
            except (OSError, EOFError) as error:
                self.reconnect(error)

    def begin(self, kind: FrameKind, seq: int, meta: dict[str, Any]) -> bool:
        """Send a request without reading its answer; return False where it could not be sent."""
        try:
            self._send(kind, seq, meta, ())
        except OSError:
            return False
        return True

    def answer(self, read: Callable[[socket.socket, Head], _Result]) -> _Result:
        """Read the answer to what was sent."""
        assert self._socket is not None, "a request was sent on it"
        try:
            head = receive(self._socket)
        except TimeoutError as error:
            raise ServerError(
                f"the parameter server at {self._where} has not answered for {self._timeout:.0f} s",
                hint="Another worker may be stuck: its stack is in its log. Or raise `timeout`.",
            ) from error
        if head.kind is FrameKind.ERROR:
            raise ServerError(f"the parameter server at {self._where} refused: {head.meta['message']}")
        self.bytes_in += head.size
        self.clock = max(self.clock, head.meta.get("clock", 0))
        return read(self._socket, head)

    def acknowledged(self, seq: int) -> None:
        """Drop the pushes of a step that has been taken."""
        self._pushed.clear()
        self.hello["passed"] = seq

    def abandon(self) -> None:
        """Make a thread that waits for an answer fail at once."""
        self._abandoned = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def _where(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def _send(self, kind: FrameKind, seq: int, meta: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        assert self._socket is not None, "closed connections are not used"
        self.bytes_out += send(self._socket, kind, seq, meta, buffers)

    def reconnect(self, cause: Exception | None) -> None:
        """Connect, with retries for `patience` seconds; `cause` is the error that ended the last connection."""
        began = time.monotonic()
        while True:
            self.close()
            if self._abandoned:
                raise ServerError(f"the connection to the parameter server at {self._where} was abandoned")
            try:
                self._connect()
            except (OSError, EOFError) as error:
                if time.monotonic() - began > self.patience:
                    raise ServerError(
                        f"the parameter server at {self._where} has been out of reach for {self.patience:.0f} s: "
                        f"{cause or error}",
                        hint="See the output of the process that started it.",
                    ) from error
                time.sleep(_PAUSE_SECONDS)
            else:
                return

    def _connect(self) -> None:
        connection = socket.create_connection(self.address, timeout=SECONDS)
        self._socket = connection
        tune(connection)
        introduce(connection, self._token)
        connection.settimeout(self._timeout)
        clock_before = self.clock
        self._send(FrameKind.HELLO, 0, self.hello, ())
        answer = self.answer(lambda _, head: head.meta)
        self.start = answer["start"]
        if answer["clock"] < clock_before:
            lost = clock_before - answer["clock"]
            self.lost_updates += lost
            self.clock = answer["clock"]
            _log.warning(
                "the parameter server at %s restarted from its saved state: %d updates lost", self._where, lost
            )
        for seq, meta, buffers, _ in self._pushed:
            self._send(FrameKind.PUSH, seq, meta, buffers)
