"""Messages between the launchers of several nodes, and heartbeats, in the TCPStore of the one that leads.

All messages go through the leader: the others write to it, and it writes to them, also what one of them sends to
another. A node waits for its next message with one operation that the store answers when the message is there, so
that nodes that have nothing to say cost the leader nothing but a heartbeat now and then (`membership.beat_seconds`).

Separate threads talk to the store: a call to a node that is cut off does not return, and the launcher must
notice that.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store

from phalanx.errors import CommunicationError
from phalanx.host.messages import Message
from phalanx.launch.membership import ALL

Mail = dict[str, Any]
"""A message with its sender."""

_POLL_SECONDS = 0.05
"""How often the leader looks for mail, in a store of its own process."""
_BATCH_SECONDS = 0.005
"""Messages that are posted within this time travel together: the ranks of a node report at the same time."""
_WAIT_SECONDS = 3600.0
_KEPT_SECONDS = 3600.0
"""So long a message to several nodes stays in the store: one that has not read it by then is long lost."""


class Mailbox:
    """This node's messages and heartbeat in a store, from `start` on. `receive` returns what has arrived."""

    def __init__(
        self,
        connect: Callable[[], Store],
        own: str,
        leader: str,
        *,
        period: Callable[[], float],
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """`connect`: return a connection to the leader's store. `period`: seconds between two heartbeats.

        `notify`: called when messages have arrived, or the store has ended.
        """
        self._own, self._leader, self._period, self._notify = own, leader, period, notify
        self._store: Any = connect()
        self._reading: Any = self._store if self._leads else connect()
        self._others: tuple[str, ...] = ()
        self._out: deque[tuple[str | Sequence[str], Mail]] = deque()
        self._in: deque[Mail] = deque()
        self._read = 0
        self._missing: list[int] = []
        """Numbers of messages that were counted and are not there."""
        self._written: Counter[str] = Counter()
        """As the leader: how many messages each node was sent."""
        self._beats = self._bodies = 0
        self._written_at: deque[tuple[float, str]] = deque()
        """As the leader: when bodies that several nodes read were written."""
        self._seen: dict[str, Any] = {}
        self.contact = time.monotonic()
        """When the store has answered last."""
        self._wakeup = threading.Event()
        self._closed = False
        self.failed = False
        """Whether the store has ended: its node is lost, or its launcher has ended."""
        runs = [self._run_leader] if self._leads else [self._run_sender, self._run_reader]
        self.threads = [threading.Thread(target=run, name="phalanx-mailbox", daemon=True) for run in runs]

    @property
    def _leads(self) -> bool:
        return self._own == self._leader

    def start(self) -> None:
        """Exchange messages and heartbeats in threads from now on."""
        for thread in self.threads:
            thread.start()

    def serve(self, nodes: Iterable[str]) -> None:
        """As the leader: let messages to `ALL` reach these nodes, and read their heartbeats."""
        self._others = tuple(node for node in nodes if node != self._own)

    def post(self, to: str | Sequence[str], message: Message) -> None:
        """Send a message to a node, to `ALL`, or as the leader to several; it arrives with this node's name."""
        self._out.append((to, {"sender": self._own, "message": message}))
        self._wakeup.set()

    def receive(self) -> list[Mail]:
        """Return the messages that have arrived."""
        return [self._in.popleft() for _ in range(len(self._in))]

    def beats(self) -> Mapping[str, Any]:
        """As the leader: return the last heartbeat counter of each node."""
        return self._seen

    def close(self, seconds: float = 0.0) -> None:
        """Wait until all messages are sent, at most `seconds`, and end the threads."""
        deadline = time.monotonic() + seconds
        while self._out and not self.failed and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 2)
        self._closed = True  # a thread that waits for a lost node ends with the process
        self._wakeup.set()

    # --- threads ------------------------------------------------------------------------------------------------

    def _run_leader(self) -> None:
        due = 0.0
        while not self._closed:
            self._wakeup.wait(_POLL_SECONDS)
            self._wakeup.clear()
            self._attempt(self._exchange_as_leader)
            if (now := time.monotonic()) > due and not self._closed:
                due = now + self._period() / 2
                self._attempt(self._read_beats)

    def _run_sender(self) -> None:
        due = 0.0
        while not self._closed and not self.failed:
            self._wakeup.wait(max(0.0, due - time.monotonic()))
            if self._wakeup.is_set():
                time.sleep(_BATCH_SECONDS)
            self._wakeup.clear()
            if time.monotonic() >= due:
                due = time.monotonic() + self._period()
                self._attempt(self._beat)
            self._attempt(self._send)
        self._attempt(self._wake_reader)

    def _run_reader(self) -> None:
        while not self._closed and not self.failed:
            self._attempt(self._await_mail)

    def _attempt(self, exchange: Callable[[], None]) -> None:
        try:
            exchange()
        except CommunicationError as error:  # written by a process outside this job, which must not end it
            print(f"phalanx: {error}", file=sys.stderr, flush=True)
        except DistStoreError:  # nothing has come
            return
        except (DistNetworkError, RuntimeError):
            self.failed = True
            self._notify()
            return
        self.contact = time.monotonic()

    # --- the leader ---------------------------------------------------------------------------------------------

    def _exchange_as_leader(self) -> None:
        self._distribute()
        count = self._store.add(f"mail/{self._own}", 0)
        self._missing += range(self._read + 1, count + 1)
        self._read = count
        # One that is not there is looked for again: its sender may have been killed after it had counted it.
        self._missing = [number for number in self._missing if not self._take(number)]
        self._distribute()

    def _distribute(self) -> None:
        """Write what this node has posted, and what others have sent through it."""
        while self._written_at and self._written_at[0][0] < time.monotonic() - _KEPT_SECONDS:
            self._store.delete_key(self._written_at.popleft()[1])
        batches: defaultdict[str, list[Any]] = defaultdict(list)
        while self._out:
            to, message = self._out.popleft()
            if to == self._own or to == ALL:
                self._in.append(message)
                self._notify()
            if to == ALL or not isinstance(to, str):
                self._bodies += 1
                body = f"{ALL}/{self._bodies}"
                self._store.set(body, json.dumps(message))
                self._written_at.append((time.monotonic(), body))
                for node in self._others if to == ALL else to:
                    batches[node].append(body)
            elif to != self._own:
                batches[to].append(message)
        for node in batches:
            self._written[node] += 1
        keys = [f"mail/{node}/{self._written[node]}" for node in batches]
        if keys:
            self._store.multi_set(keys, [json.dumps(batch) for batch in batches.values()])

    def _take(self, number: int) -> bool:
        key = f"mail/{self._own}/{number}"
        if not self._store.check([key]):
            return False
        try:
            batch = json.loads(self._store.get(key))
        except CommunicationError as error:  # the messages after it are read all the same
            print(f"phalanx: {error}", file=sys.stderr, flush=True)
            batch = []
        self._store.delete_key(key)
        for to, message in batch:
            if to == self._own:
                self._in.append(message)
                self._notify()
            else:
                self._out.append((to, message))
        return True

    def _read_beats(self) -> None:
        nodes = self._others
        keys = [f"beat/{node}" for node in nodes]
        if not keys:
            return
        if not self._store.check(keys):  # in a store that was taken over some have not written yet
            for key in keys:
                self._store.compare_set(key, "", "0")
        self._seen = dict(zip(nodes, self._store.multi_get(keys), strict=True))

    # --- the others ---------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._own}", str(self._beats))

    def _send(self) -> None:
        batch = [self._out[index] for index in range(len(self._out))]
        if batch:
            number = self._store.add(f"mail/{self._leader}", 1)
            self._store.set(f"mail/{self._leader}/{number}", json.dumps(batch))
            for _ in batch:
                self._out.popleft()

    def _await_mail(self) -> None:
        key = f"mail/{self._own}/{self._read + 1}"
        self._reading.wait([key], timedelta(seconds=_WAIT_SECONDS))
        self._read += 1
        for message in json.loads(self._reading.get(key)):
            is_body = isinstance(message, str)  # what goes to all is written once
            self._in.append(json.loads(self._reading.get(message)) if is_body else message)
        self._reading.delete_key(key)
        self._notify()

    def _wake_reader(self) -> None:
        if not self.failed:
            self._store.set(f"mail/{self._own}/{self._read + 1}", "[]")
