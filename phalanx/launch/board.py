"""Messages between the launchers of several machines, and their heartbeats, in a TCPStore.

A thread of its own talks to the store: a call to a machine that is cut off does not return, and the launcher must
notice that. Every machine keeps a standby store, to which the others move when the machine with the first one is lost.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from phalanx.errors import CommunicationError

if TYPE_CHECKING:
    from torch.distributed import Store

Mail = dict[str, Any]

_PERIOD_SECONDS = 0.05


class Board:
    """This machine's mailbox and heartbeat in a store. `receive` returns what has arrived."""

    def __init__(self, store: Store, own: str) -> None:
        self._store, self._own = store, own
        self._out: queue.SimpleQueue[tuple[str, Mail]] = queue.SimpleQueue()
        self._posted = self._sent = 0
        self._in: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._read = 0
        self._expected: list[int] = []
        """Numbers of messages that were counted and have not been seen."""
        self._watched: list[str] = []
        self._beats: dict[str, tuple[int, float]] = {}
        self._contact = time.monotonic()
        self._closed = threading.Event()
        self.failed = False
        """Whether the store has ended: its machine is lost, or its launcher has ended."""
        threading.Thread(target=self._run, name="phalanx-board", daemon=True).start()

    def post(self, to: str, message: Mail) -> None:
        """Send a message to the launcher of a machine."""
        self._posted += 1
        self._out.put((to, {**message, "sender": self._own}))

    def receive(self) -> list[Mail]:
        """Return the messages that have arrived."""
        found = []
        while not self._in.empty():
            found.append(self._in.get())
        return found

    def watch(self, nodes: list[str]) -> None:
        """Watch the heartbeats of these machines from now on."""
        now = time.monotonic()
        self._beats = {node: self._beats.get(node, (-1, now)) for node in nodes}
        self._watched = list(nodes)

    def silent(self, seconds: float) -> list[str]:
        """Return the watched machines without a heartbeat for so long."""
        now = time.monotonic()
        return [node for node, (_, seen) in self._beats.items() if now - seen > seconds]

    def unreachable(self, seconds: float) -> bool:
        """Whether the store has not answered for so long, or has ended."""
        return self.failed or time.monotonic() - self._contact > seconds

    def flush(self, seconds: float) -> None:
        """Wait until all messages were sent."""
        deadline = time.monotonic() + seconds
        while self._sent < self._posted and not self.failed and time.monotonic() < deadline:
            time.sleep(_PERIOD_SECONDS / 2)

    def close(self) -> None:
        """End the thread; one that waits for a lost machine ends with the process."""
        self._closed.set()

    def _run(self) -> None:
        from torch.distributed import DistNetworkError

        while not self._closed.wait(_PERIOD_SECONDS):
            try:
                self._exchange()
            except (DistNetworkError, RuntimeError):
                self.failed = True
                return
            self._contact = time.monotonic()

    def _take(self, key: str) -> bool:
        """Take a message, unless it is not there: its sender may have been killed after it had counted it."""
        if not self._store.check([key]):
            return False
        try:
            self._in.put(json.loads(self._store.get(key)))
        except CommunicationError as error:  # written by a process outside this job, which must not end it
            print(f"phalanx: {error}", file=sys.stderr, flush=True)
        return True

    def _exchange(self) -> None:
        self._store.add(f"beat/{self._own}", 1)
        while not self._out.empty():
            to, message = self._out.get()
            number = self._store.add(f"mail/{to}", 1)
            self._store.set(f"mail/{to}/{number}", json.dumps(message))
            self._sent += 1
        count = self._store.add(f"mail/{self._own}", 0)
        self._expected += range(self._read + 1, count + 1)
        self._read = count
        self._expected = [number for number in self._expected if not self._take(f"mail/{self._own}/{number}")]
        for node in self._watched:
            beat = self._store.add(f"beat/{node}", 0)
            if self._beats.get(node, (-1, 0.0))[0] != beat:
                self._beats[node] = (beat, time.monotonic())


def is_refused(address: tuple[str, int], seconds: float = 1.0) -> bool:
    """Whether a machine answers that no process listens there: it is up, and its launcher has ended."""
    try:
        with socket.create_connection(address, timeout=seconds):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def answers(address: tuple[str, int], seconds: float) -> bool:
    """Whether a process listens at an address."""
    try:
        with socket.create_connection(address, timeout=seconds):
            return True
    except OSError:
        return False


def may_continue(members: list[str], alive: list[str], ended: list[str], leader: str) -> bool:
    """Whether the machines that see each other may go on without the others: never two parts of a run at once.

    `ended`: machines whose launcher has certainly ended. Of the others more than half must be here; half is enough
    where `leader`, the machine that decided before, is one of them.
    """
    rest = [node for node in members if node not in ended]
    here = [node for node in rest if node in alive]
    return 2 * len(here) > len(rest) or (2 * len(here) == len(rest) and leader in here)
