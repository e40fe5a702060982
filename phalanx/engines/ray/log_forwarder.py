"""Send a Ray rank's output and events to the launcher, from a thread, a few times per second."""

from __future__ import annotations

import json
import os
import selectors
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.launch.forkserver import messages as wire
from phalanx.observe import control
from phalanx.observe.heartbeat import HeartbeatBoard

_FLUSH_SECONDS = 0.1
_STEP_SECONDS = 1.0
_CHUNK = 1 << 16
_EVENT_BYTES = 1 << 18


class LogForwarder:
    """Collects the rank's output and events, and sends them to the conductor."""

    def __init__(self, conductor: Any, rank: int, board: HeartbeatBoard) -> None:
        self._conductor = conductor
        self._rank = rank
        self._board = board
        self._told: int | None = None
        self._tell_at = 0.0
        self.last_words = ""
        self.keeps_events = False
        """Whether the launcher writes the run's events file: the rank's own is on another machine."""
        self._messages: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._output, self.output_end = os.pipe2(os.O_CLOEXEC)
        self._events, self.events_end = wire.socket_pair()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="phalanx-post", daemon=True)
        self._stop: Any = conductor.stop_reason.remote()
        os.set_blocking(self._output, False)
        self._events.setblocking(False)
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message with the next batch."""
        with self._lock:
            self._messages.append(message)

    def close(self) -> None:
        """Send the rest and wait until it has arrived."""
        self._ended.set()
        self._thread.join()
        for end in (self._output, self.output_end):
            os.close(end)
        self._events.close()
        self.events_end.close()

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._events, selectors.EVENT_READ)
            while not self._ended.is_set():
                selector.select(_FLUSH_SECONDS * 2)
                self._ended.wait(_FLUSH_SECONDS)  # sends one burst in one message
                self._deliver()
        self._deliver(wait=True)

    def _deliver(self, *, wait: bool = False) -> None:
        import ray

        self._read()
        self._tell_step()
        with self._lock:
            messages, self._messages = self._messages, []
        if wait and self.last_words:
            messages.append({"log": self.last_words.encode(), "rank": self._rank})
        if messages:
            sent = self._conductor.post.remote(messages)
            if wait:
                ray.get(sent)
        if self._stop is not None and ray.wait([self._stop], timeout=0)[0]:
            control.wish(ray.get(self._stop))
            self._stop = None

    def _tell_step(self) -> None:
        """Report the current step now and then: if the machine is lost, nothing else is known."""
        beat = self._board.read(self._rank)
        if beat is not None and beat.step != self._told and time.monotonic() >= self._tell_at:
            self._told, self._tell_at = beat.step, time.monotonic() + _STEP_SECONDS
            self.send({"at": beat.step, "rank": self._rank})

    def _read(self) -> None:
        output = b"".join(wire.read_available(lambda: os.read(self._output, _CHUNK)))
        if output:
            self.send({"output": output, "rank": self._rank})
        for data in wire.read_available(lambda: self._events.recv(_EVENT_BYTES)):
            self.send({"event": json.loads(data), "keep": self.keeps_events})


@contextmanager
def forwarding(conductor: Any, rank: int, board: HeartbeatBoard) -> Iterator[LogForwarder]:
    """Send to the launcher what any library prints to stdout and stderr here, and the events of the loop."""
    post = LogForwarder(conductor, rank, board)
    before = [os.dup(1), os.dup(2)]
    streams = sys.stdout, sys.stderr
    for number in (1, 2):
        os.dup2(post.output_end, number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    os.environ["PHALANX_EVENTS_FD"] = str(post.events_end.fileno())
    try:
        yield post
    finally:
        ours = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = streams
        for stream in ours:
            stream.close()
        for number, saved in enumerate(before, start=1):
            os.dup2(saved, number)
            os.close(saved)
        post.close()
