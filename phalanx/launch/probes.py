"""Whether other nodes' launchers run: questions to many at the same time, and a standing watch of a few.

`Probes` try a connection to each, without waiting. `NeighbourWatch` keeps connections to the standby stores of a few
nodes and asks them again and again, in threads: such a call to a node that is cut off does not return.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping

from torch.distributed import DistNetworkError, Store

from phalanx.launch.membership import SUSPECT_SECONDS

Address = tuple[str, int]
_POLL_SECONDS = 0.01
_WATCH_SECONDS = 0.3


class Probes:
    """Connections that are being tried. An answer is True, False if the node refuses, None if it is silent."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long a node may take to answer, and how long it is not asked again after that."""
        self._seconds = seconds
        self._asked: dict[str, float] = {}
        self._open: dict[str, socket.socket] = {}

    def ask(self, addresses: Mapping[str, Address]) -> None:
        """Ask nodes, by their names, that are not being asked and were not just asked."""
        now = time.monotonic()
        for name, address in addresses.items():
            if name not in self._open and now - self._asked.get(name, -self._seconds) >= self._seconds:
                self._asked[name] = now
                self._connect(name, address)

    def _connect(self, name: str, address: Address) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open[name] = connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        connection.connect_ex((address[0], address[1]))  # its result is an option of the socket, too

    def answers(self) -> dict[str, bool | None]:
        """Return the answers that have come since the last call."""
        poll = select.poll()
        for connection in self._open.values():
            poll.register(connection, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(0)} if self._open else set()
        now, answers = time.monotonic(), dict[str, bool | None]()
        for name, connection in list(self._open.items()):
            if connection.fileno() in ready:
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                answers[name] = {0: True, errno.ECONNREFUSED: False}.get(error)
            elif now - self._asked[name] > self._seconds:
                answers[name] = None
            if name in answers:
                self._open.pop(name).close()
        return answers


def ask_all(addresses: Mapping[str, Address], seconds: float) -> dict[str, bool | None]:
    """Ask nodes, and wait for their answers."""
    probes, answers = Probes(seconds), dict[str, bool | None]()
    probes.ask(addresses)
    while len(answers) < len(addresses):
        answers |= probes.answers()
        time.sleep(_POLL_SECONDS if len(answers) < len(addresses) else 0.0)
    return answers


class NeighbourWatch:
    """Asks the standby stores of some nodes whether they are there."""

    def __init__(self, open_store: Callable[[Address], Store], notify: Callable[[], None]) -> None:
        """`open_store`: connect to a standby store. `notify`: called when a node has ended."""
        self._open_store, self._notify = open_store, notify
        self._links: dict[str, _Link] = {}

    def watch(self, addresses: Mapping[str, Address]) -> None:
        """Watch these nodes from now on, and no others."""
        for name in [name for name in self._links if name not in addresses]:
            self._links.pop(name).closed = True
        for name, address in addresses.items():
            if name not in self._links:
                self._links[name] = _Link(address, self._open_store, self._notify)

    def heard(self) -> dict[str, float | None]:
        """Return when each node has answered last; None: it refuses connections."""
        return {name: None if link.ended else link.heard for name, link in self._links.items()}


class _Link:
    """A connection to a standby store, and when it has answered last."""

    def __init__(self, address: Address, open_store: Callable[[Address], Store], notify: Callable[[], None]) -> None:
        self._address, self._open_store, self._notify = address, open_store, notify
        self.heard = time.monotonic()
        self.ended = self.closed = False
        threading.Thread(target=self._run, name="phalanx-neighbour", daemon=True).start()

    def _run(self) -> None:
        store: Store | None = None
        while not self.closed and not self.ended:
            try:
                if store is None and ask_all({"": self._address}, SUSPECT_SECONDS)[""] is False:
                    self.ended = True
                    self._notify()
                    return
                store = store or self._open_store(self._address)
                store.add("asked", 1)
                self.heard = time.monotonic()
            except (DistNetworkError, RuntimeError):
                store = None
            time.sleep(_WATCH_SECONDS)
