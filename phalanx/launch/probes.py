"""Whether other machines' launchers run: a connection to each is tried, to all at the same time, without waiting."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping

Address = tuple[str, int]
_POLL_SECONDS = 0.01


class Probes:
    """Connections that are being tried. An answer is True, False if the machine refuses, None if it is silent."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long a machine may take to answer, and how long it is not asked again after that."""
        self._seconds = seconds
        self._asked: dict[str, float] = {}
        self._open: dict[str, socket.socket] = {}

    def ask(self, addresses: Mapping[str, Address]) -> None:
        """Ask machines, by their names, that are not being asked and were not just asked."""
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
        now, found = time.monotonic(), dict[str, bool | None]()
        for name, connection in list(self._open.items()):
            if connection.fileno() in ready:
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                found[name] = {0: True, errno.ECONNREFUSED: False}.get(error)
            elif now - self._asked[name] > self._seconds:
                found[name] = None
            if name in found:
                self._open.pop(name).close()
        return found


def ask_all(addresses: Mapping[str, Address], seconds: float) -> dict[str, bool | None]:
    """Ask machines, and wait for their answers."""
    probes, found = Probes(seconds), dict[str, bool | None]()
    probes.ask(addresses)
    while len(found) < len(addresses):
        found |= probes.answers()
        time.sleep(_POLL_SECONDS if len(found) < len(addresses) else 0.0)
    return found
