"""A server shard's connections: it authenticates each worker and answers it in a separate thread."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.engines.parameter_server.core import ShardCore
from phalanx.engines.parameter_server.gradients import Bundle, Rows
from phalanx.engines.parameter_server.membership import ShardSpec
from phalanx.engines.parameter_server.placement import digest_of, piece_from
from phalanx.engines.parameter_server.protocol import (
    FrameKind,
    Head,
    bytes_of,
    dtype_of,
    greet,
    receive,
    receive_into,
    send,
    tune,
)
from phalanx.errors import ServerError

_log = logging.getLogger("phalanx.server")
_MAX_UNPROVEN = 64
"""Connections that have not proved that they know the token, each with a thread; beyond, the oldest is dropped."""
_MAX_STATE_FACTOR = 32
"""A LOAD of more than this many times the parameters' bytes is refused before memory is allocated."""
_SLACK_BYTES = 1 << 20


class ServerShard:
    """Serves one shard on a listening socket until `close`."""

    def __init__(self, spec: ShardSpec, listener: socket.socket) -> None:
        self.core = ShardCore(spec)
        self._spec = spec
        self._listener = listener
        self._numbers = itertools.count(1)
        self._open: set[socket.socket] = set()
        self._unproven: dict[socket.socket, None] = {}
        self._admitting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def serve(self) -> None:
        """Answer workers until the listening socket is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closing.is_set():
                    return
                raise
            self._admit(connection)
            thread = threading.Thread(target=self._serve_worker, args=(connection,), name="phalanx-shard", daemon=True)
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
            thread.start()

    def _admit(self, connection: socket.socket) -> None:
        """Note a connection without proof; drop the oldest of them where there are too many."""
        with self._admitting:
            self._unproven[connection] = None
            if len(self._unproven) <= _MAX_UNPROVEN:
                return
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
        with contextlib.suppress(OSError):  # its thread may just be closing it
            oldest.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections and end their threads."""
        self._closing.set()
        self.core.close()
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):  # the other side may have closed it
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _serve_worker(self, connection: socket.socket) -> None:
        number = next(self._numbers)
        worker: int | None = None
        self._open.add(connection)
        try:
            with connection:
                tune(connection)
                greet(connection, self._spec.token)
                with self._admitting:
                    self._unproven.pop(connection, None)
                worker = self._register(connection, number)
                while True:
                    self._answer(connection, worker)
        except (OSError, EOFError):
            pass  # the worker has disconnected
        except (ServerError, ValueError) as error:  # an invalid message
            _log.warning("shard %d: %s", self._spec.number, error)
        finally:
            with self._admitting:
                self._unproven.pop(connection, None)
            self._open.discard(connection)
            if worker is not None:
                self.core.goodbye(worker, number)

    def _receive(self, connection: socket.socket) -> Head:
        head = receive(connection)
        self.core.stats.received(head.kind.name, head.size)
        return head

    def _register(self, connection: socket.socket, number: int) -> int:
        head = self._receive(connection)
        if head.kind is not FrameKind.HELLO or head.meta.get("placement") != digest_of(self.core.pieces):
            message = "this worker has another model, optimizer or number of shards than the server"
            send(connection, FrameKind.ERROR, head.seq, {"message": message})
            raise ServerError(message)
        worker = int(head.meta["worker"])
        self._reply(connection, head, self.core.hello(worker, number, head.meta.get("passed")))
        return worker

    def _answer(self, connection: socket.socket, worker: int) -> None:
        """Read one request and answer it; a push has no answer."""
        head = self._receive(connection)
        core = self.core
        try:
            match head.kind:
                case FrameKind.PUSH:
                    self._handle_push(connection, worker, head)
                case FrameKind.NORM:
                    self._reply(connection, head, core.norm(worker, head.seq))
                case FrameKind.COMMIT:
                    core.commit(worker, head.seq, head.meta)
                    self._send_values(connection, worker, head)
                case FrameKind.PULL:
                    self._send_values(connection, worker, head)
                case FrameKind.FETCH:
                    bundle = core.fetch()
                    self._reply(connection, head, bundle.describe(), bundle.buffers())
                case FrameKind.LOAD:
                    core.load(self._receive_bundle(connection, head))
                    self._reply(connection, head, {"clock": core.clock})
                case FrameKind.STATS:
                    self._reply(connection, head, core.stats.to_dict())
                case FrameKind.REPLACE:
                    core.replace([piece_from(piece) for piece in head.meta["pieces"]])
                    self._reply(connection, head, {"clock": core.clock})
                case FrameKind.COSTS:
                    self._reply(connection, head, {"moved": core.moved})
                case _:
                    raise ServerError(f"{head.kind.name} is not a request")
        except (ServerError, RuntimeError, KeyError, ValueError, TypeError, IndexError) as error:
            send(connection, FrameKind.ERROR, head.seq, {"message": f"{type(error).__name__}: {error}"})
            raise ServerError(f"{head.kind.name} of worker {worker}: {error}") from error

    def _handle_push(self, connection: socket.socket, worker: int, head: Head) -> None:
        """Receive gradients straight into the worker's memory: whole pieces, or rows of them."""
        part = self.core.contribution(worker, head.seq)
        pieces = self.core.pieces
        left = head.payload
        for index, count, sparse in head.meta["parts"]:
            piece = pieces[index]
            if count < 0:
                left = _take(connection, bytes_of(part.memory.views[index]), left)
                self.core.moved[index] += piece.nbytes
                part.dense.add(index)
                part.rows.pop(index, None)
                continue
            if count > piece.shape[0]:
                raise ServerError(f"{count} rows of {piece.name} were pushed, which has {piece.shape[0]} here")
            rows = torch.empty(count, dtype=torch.int64)
            values = torch.empty((count, *piece.shape[1:]), dtype=dtype_of(piece.dtype))
            left = _take(connection, bytes_of(values), _take(connection, bytes_of(rows), left))
            self.core.moved[index] += values.nbytes
            if count and not 0 <= int(rows.min()) <= int(rows.max()) < piece.shape[0]:
                raise ServerError(f"rows of {piece.name} were pushed that it does not have here")
            part.rows[index] = Rows(rows, values, bool(sparse))
            part.dense.discard(index)
        if left:
            raise ServerError("a push is longer than its parts")

    def _receive_bundle(self, connection: socket.socket, head: Head) -> Bundle:
        limit = _MAX_STATE_FACTOR * sum(piece.nbytes for piece in self.core.pieces) + _SLACK_BYTES
        if head.payload > limit:
            raise ServerError(f"{head.payload} bytes of state were announced; this shard takes up to {limit}")
        bundle = Bundle.allocate(head.meta, head.payload)
        for view in bundle.buffers():
            receive_into(connection, view)
        return bundle

    def _send_values(self, connection: socket.socket, worker: int, head: Head) -> None:
        meta, _kept_alive, buffers = self.core.values(worker)
        self._reply(connection, head, meta, buffers)

    def _reply(
        self, connection: socket.socket, head: Head, meta: dict[str, Any], buffers: Sequence[memoryview] = ()
    ) -> None:
        self.core.stats.sent(send(connection, FrameKind.REPLY, head.seq, meta, buffers))


def _take(connection: socket.socket, view: memoryview, left: int) -> int:
    """Fill memory from the message, of which `left` bytes have not been read; return how many remain."""
    if view.nbytes > left:
        raise ServerError("a push is shorter than its parts")
    receive_into(connection, view)
    return left - view.nbytes
