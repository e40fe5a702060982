"""A worker's connection to one shard. It survives the shard's death: it calls again, and says again what was lost."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from phalanx.comm.ps.protocol import SECONDS, FrameKind, Head, introduce, receive, send, tune
from phalanx.errors import ServerError

_log = logging.getLogger("phalanx.server")
_Result = TypeVar("_Result")
_PAUSE_SECONDS = 0.05


class ServerConnection:
    """One connection, with what has been pushed for the step under way and not been acknowledged yet."""

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
        self._hello: dict[str, Any] = {"worker": worker, "placement": placement, "passed": None}
        self._patience = patience
        self._timeout = timeout
        self._abandoned = False
        self._pushed: list[tuple[int, dict[str, Any], Sequence[memoryview], Any]] = []
        self._socket: socket.socket | None = None
        self._connect_patiently(None)

    def expect(self, placement: str) -> None:
        """Note the mark of the placement that the shard is to have when this link says hello again."""
        self._hello["placement"] = placement

    def push(self, seq: int, meta: dict[str, Any], buffers: Sequence[memoryview], alive: Any) -> None:
        """Send gradients; `alive` holds their memory until the step is acknowledged, in case they must go again."""
        self._pushed.append((seq, meta, buffers, alive))
        try:
            self._send(FrameKind.PUSH, seq, meta, buffers)
        except OSError as error:
            self._connect_patiently(error)  # which says everything of this step again, this push included

    def ask(
        self,
        kind: FrameKind,
        seq: int,
        meta: dict[str, Any],
        read: Callable[[socket.socket, Head], _Result],
        buffers: Sequence[memoryview] = (),
    ) -> _Result:
        """Send a request and read its answer; again on a new connection where the shard was lost between."""
        while True:
            try:
                self._send(kind, seq, meta, buffers)
                return self.answer(read)
            except (OSError, EOFError) as error:
                self._connect_patiently(error)

    def begin(self, kind: FrameKind, seq: int, meta: dict[str, Any]) -> bool:
        """Send a request whose answer is read later, so that several shards work at once; False: it did not go out."""
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
            raise ServerError(f"the parameter server at {self._where} refuses: {head.meta['message']}")
        self.bytes_in += head.size
        self.clock = max(self.clock, head.meta.get("clock", 0))
        return read(self._socket, head)

    def acknowledged(self, seq: int) -> None:
        """Forget what was pushed for a step that has been taken."""
        self._pushed.clear()
        self._hello["passed"] = seq

    def reconnect(self, error: Exception) -> None:
        """Connect again after an error that was met while reading an answer."""
        self._connect_patiently(error)

    def abandon(self) -> None:
        """Let whoever waits for an answer, in another thread, give up at once."""
        self._abandoned = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection: to the shard this worker is gone."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def _where(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def _send(self, kind: FrameKind, seq: int, meta: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        assert self._socket is not None, "closed links are not used"
        self.bytes_out += send(self._socket, kind, seq, meta, buffers)

    def _connect_patiently(self, cause: Exception | None) -> None:
        deadline = time.monotonic() + self._patience
        while True:
            self.close()
            if self._abandoned:
                raise ServerError(f"the connection to the parameter server at {self._where} was given up")
            try:
                self._connect()
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"the parameter server at {self._where} has been out of reach for {self._patience:.0f} s: "
                        f"{cause or error}",
                        hint="Its own output says why, where it was started.",
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
        self._send(FrameKind.HELLO, 0, self._hello, ())
        found = self.answer(lambda _, head: head.meta)
        self.start = found["start"]
        if found["clock"] < clock_before:
            lost = clock_before - found["clock"]
            self.lost_updates += lost
            self.clock = found["clock"]
            _log.warning(
                "the parameter server at %s came back from its saved state: %d updates since are lost",
                self._where,
                lost,
            )
        for seq, meta, buffers, _ in self._pushed:
            self._send(FrameKind.PUSH, seq, meta, buffers)
