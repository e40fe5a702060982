"""Messages between the launchers of several machines, and their heartbeats, in a TCPStore.

A thread of its own talks to the store: a call to a machine that is cut off does not return, and the launcher must
notice that.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.errors import CommunicationError

if TYPE_CHECKING:
    from torch.distributed import Store

Mail = dict[str, Any]

ALL = "all"
"""The address of a message to every machine, the sender included."""
_PERIOD_SECONDS = (0.05, 0.5)
_EXCHANGES_PER_SECOND = 5_000


def exchange_period(num_nodes: int) -> float:
    """Return the seconds between two exchanges with the store, so that its load does not grow with the machines.

    An exchange has three operations: 2 machines exchange every 0.05 s (120 operations per second), 1,024 every 0.2 s
    (15,000). Beyond 2,500 machines heartbeats have to come in time, and the load grows.
    """
    shortest, longest = _PERIOD_SECONDS
    return min(max(shortest, num_nodes / _EXCHANGES_PER_SECOND), longest)


class Heartbeats:
    """When the heartbeat counter of each machine last changed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[Any, float]] = {}

    def watch(self, nodes: Iterable[str]) -> None:
        """Watch these machines from now on; new ones count as just seen."""
        now = self._clock()
        self._seen = {node: self._seen.get(node, (None, now)) for node in nodes}

    @property
    def watched(self) -> list[str]:
        """The machines that are watched."""
        return list(self._seen)

    def take(self, beats: Mapping[str, Any]) -> None:
        """Take the present counters; those of machines that are not watched are ignored."""
        now, seen = self._clock(), self._seen
        for node, beat in beats.items():
            if node in seen and seen[node][0] != beat:
                seen[node] = (beat, now)

    def silent(self, seconds: float) -> list[str]:
        """Return the watched machines without a heartbeat for this many seconds."""
        now = self._clock()
        return [node for node, (_, changed) in list(self._seen.items()) if now - changed > seconds]


class Mailbox:
    """This machine's messages and heartbeat in a store, from `start` on. `receive` returns what has arrived."""

    def __init__(
        self,
        store: Store,
        own: str,
        num_nodes: int = 1,
        notify: Callable[[], None] = lambda: None,
        *,
        joins_late: bool = False,
    ) -> None:
        """`notify`: called when messages have arrived. `joins_late`: skip what was sent to all machines before."""
        self._store, self._own, self._notify = store, own, notify
        self._period = exchange_period(num_nodes)
        self._out: deque[tuple[str, Mail]] = deque()
        self._in: deque[Mail] = deque()
        self._read = {own: 0, ALL: store.add(f"mail/{ALL}", 0) if joins_late else 0}
        self._expected: list[str] = []
        """Keys of messages that were counted and have not been seen."""
        self._beats = 0
        self.others = Heartbeats()
        """The heartbeats of the machines that this one watches."""
        self._contact = time.monotonic()
        self._wakeup = threading.Event()
        self.thread = threading.Thread(target=self._run, name="phalanx-mailbox", daemon=True)
        self._closed = False
        self.failed = False
        """Whether the store has ended: its machine is lost, or its launcher has ended."""
        self._awaited = ""
        self.has_arrived = False
        """Whether the key that is waited for has a value."""

    def wait_for(self, key: str) -> None:
        """Look for a key at every exchange, until `has_arrived`."""
        self._awaited = key

    def start(self) -> None:
        """Exchange messages and heartbeats in a thread from now on."""
        self.thread.start()

    def post(self, to: str, message: Mail) -> None:
        """Send a message to the launcher of a machine, or to `ALL`."""
        self._out.append((to, {**message, "sender": self._own}))
        self._wakeup.set()

    def receive(self) -> list[Mail]:
        """Return the messages that have arrived."""
        return [self._in.popleft() for _ in range(len(self._in))]

    def unreachable(self, seconds: float) -> bool:
        """Whether the store has not answered for this many seconds."""
        return time.monotonic() - self._contact > seconds

    def close(self, seconds: float = 0.0) -> None:
        """Wait until all messages are sent, at most `seconds`, and end the thread."""
        deadline = time.monotonic() + seconds
        while self._out and not self.failed and time.monotonic() < deadline:
            time.sleep(_PERIOD_SECONDS[0] / 2)
        self._closed = True  # a thread that waits for a lost machine ends with the process
        self._wakeup.set()

    def _run(self) -> None:
        from torch.distributed import DistNetworkError

        while not self._closed:
            self._wakeup.wait(self._period)
            self._wakeup.clear()
            try:
                self._exchange()
            except CommunicationError as error:  # written by a process outside this job, which must not end it
                print(f"phalanx: {error}", file=sys.stderr, flush=True)
            except (DistNetworkError, RuntimeError):
                self.failed = True
                self._notify()
                return
            self._contact = time.monotonic()

    def _exchange(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._own}", str(self._beats))
        while self._out:
            to, message = self._out[0]
            number = self._store.add(f"mail/{to}", 1)
            self._store.set(f"mail/{to}/{number}", json.dumps(message))
            self._out.popleft()
        for inbox, read in self._read.items():
            count = self._store.add(f"mail/{inbox}", 0)
            self._expected += [f"mail/{inbox}/{number}" for number in range(read + 1, count + 1)]
            self._read[inbox] = count
        self._expected = [key for key in self._expected if not self._take(key)]
        if self._in:
            self._notify()
        if self._awaited and self._store.check([self._awaited]):
            self._awaited, self.has_arrived = "", True
            self._notify()
        self._read_beats()

    def _take(self, key: str) -> bool:
        """Take a message, unless it is not there: its sender may have been killed after it had counted it."""
        if not self._store.check([key]):
            return False
        try:
            self._in.append(json.loads(self._store.get(key)))
        except CommunicationError as error:  # the messages after it are read all the same
            print(f"phalanx: {error}", file=sys.stderr, flush=True)
        return True

    def _read_beats(self) -> None:
        nodes = self.others.watched
        keys = [f"beat/{node}" for node in nodes]
        if not keys:
            return
        if not self._store.check(keys):  # in a store that was taken over some have not written yet
            for key in keys:
                self._store.compare_set(key, "", "0")
        self.others.take(dict(zip(nodes, self._store.multi_get(keys), strict=True)))


def may_continue(members: list[str], alive: list[str], ended: list[str], leader: str) -> bool:
    """Whether the machines that see each other may go on without the others: never two parts of a run at once.

    `ended`: machines whose launcher has certainly ended. Of the others more than half must be here; half is enough
    where `leader`, the machine that decided before, is one of them. For example, of four machines that a cut network
    divides into two and two, the pair with the leader goes on; after its launcher has ended, two of the other three do.
    """
    rest = [node for node in members if node not in ended]
    here = [node for node in rest if node in alive]
    return 2 * len(here) > len(rest) or (2 * len(here) == len(rest) and leader in here)
