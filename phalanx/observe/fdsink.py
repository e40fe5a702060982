"""Send events to the process that launched this rank, one datagram each, over a socket it left open for us."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import stat
from typing import TYPE_CHECKING

from phalanx.observe.events import StepDone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.observe.events import Event

EVENTS_FD = "PHALANX_EVENTS_FD"
"""The environment variable in which the launcher names the file descriptor."""

_PATIENCE_MS = 200


class FdSink:
    """Writes events to a datagram socket; goes silent when the other end has gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket: socket.socket | None = connection
        connection.setblocking(False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> FdSink | None:
        """Return a sink on the launcher's socket, or None when there is none or it is something else."""
        value = (os.environ if environ is None else environ).get(EVENTS_FD, "")
        if not value.isdecimal() or not _is_socket(int(value)):
            return None
        # A copy of the descriptor: closing the sink must not close the launcher's, which a second run may use.
        return cls(socket.socket(fileno=os.dup(int(value))))

    def handle(self, event: Event) -> None:
        """Send an event. A parent too busy to read loses step events; others are worth a short wait."""
        if self._socket is None:
            return
        data = event.to_json().encode()
        try:
            self._socket.send(data)
        except BlockingIOError:
            if not isinstance(event, StepDone):
                self._send_patiently(data)
        except OSError as error:
            self._leave_if_alone(error)

    def close(self) -> None:
        """Let go of the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send_patiently(self, data: bytes) -> None:
        assert self._socket is not None
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        if not poller.poll(_PATIENCE_MS):
            return
        try:
            self._socket.send(data)
        except BlockingIOError:
            return  # Another rank took the room: an event lost is better than a step delayed further.
        except OSError as error:
            self._leave_if_alone(error)

    def _leave_if_alone(self, error: OSError) -> None:
        if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
            raise error
        self.close()


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def announce(what: str, rank: int) -> None:
    """Send "joining" or "joined": this rank enters or leaves its rendezvous."""
    descriptor = os.environ.get(EVENTS_FD, "")
    if not descriptor.isdecimal():
        return
    with socket.socket(fileno=os.dup(int(descriptor))) as events:
        try:
            events.send(json.dumps({"event": what, "rank": rank}).encode())
        except (BrokenPipeError, ConnectionResetError):
            return  # the launcher has ended, and this rank will be killed
