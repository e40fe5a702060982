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

from phalanx.host import messages
from phalanx.observe import control
from phalanx.observe.heartbeat import HeartbeatBoard

_FLUSH_SECONDS = 0.1
_STEP_SECONDS = 1.0
_CHUNK = 1 << 16
_EVENT_BYTES = 1 << 18


class LogForwarder:
    """Collects the rank's output and events, and sends them to the controller actor."""

    def __init__(self, controller: Any, rank: int, board: HeartbeatBoard) -> None:
        self._controller = controller
        self._rank = rank
        self._board = board
        self._sent_step: int | None = None
        self._next_step_at = 0.0
        self.final_output = ""
        self.keeps_events = False
        """Whether the launcher writes the run's events file: the rank's own is on another machine."""
        self._messages: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._output, self.output_end = os.pipe2(os.O_CLOEXEC)
        self._events, self.events_end = messages.socket_pair()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-log", daemon=True)
        self._stop: Any = controller.stop_reason.remote()
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

    def _run(self) -> None:
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
        self._report_step()
        with self._lock:
            waiting, self._messages = self._messages, []
        if wait and self.final_output:
            waiting.append({"log": self.final_output.encode(), "rank": self._rank})
        if waiting:
            sent = self._controller.post.remote(waiting)
            if wait:
                ray.get(sent)
        if self._stop is not None and ray.wait([self._stop], timeout=0)[0]:
            control.request_stop(ray.get(self._stop))
            self._stop = None

    def _report_step(self) -> None:
        """Report the current step about once per second: if the machine is lost, nothing else is known."""
        beat = self._board.read(self._rank)
        if beat is not None and beat.step != self._sent_step and time.monotonic() >= self._next_step_at:
            self._sent_step, self._next_step_at = beat.step, time.monotonic() + _STEP_SECONDS
            self.send({"at": beat.step, "rank": self._rank})

    def _read(self) -> None:
        output = b"".join(messages.read_available(lambda: os.read(self._output, _CHUNK)))
        if output:
            self.send({"output": output, "rank": self._rank})
        for data in messages.read_available(lambda: self._events.recv(_EVENT_BYTES)):
            self.send({"event": json.loads(data), "keep": self.keeps_events})


@contextmanager
def forwarding(controller: Any, rank: int, board: HeartbeatBoard) -> Iterator[LogForwarder]:
    """Send to the launcher what any library prints to stdout and stderr here, and the events of the loop."""
    forwarder = LogForwarder(controller, rank, board)
    before = [os.dup(1), os.dup(2)]
    streams = sys.stdout, sys.stderr
    for number in (1, 2):
        os.dup2(forwarder.output_end, number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    os.environ["PHALANX_EVENTS_FD"] = str(forwarder.events_end.fileno())
    try:
        yield forwarder
    finally:
        replaced = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = streams
        for stream in replaced:
            stream.close()
        for number, saved in enumerate(before, start=1):
            os.dup2(saved, number)
            os.close(saved)
        forwarder.close()
