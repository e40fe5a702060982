"""The event stream and its plain sinks: JSON lines, and datagrams to the launcher.

Also the sinks of other packages (entry points of the group `phalanx.sinks`), and `tracking.json`: the ids of a run at
tracking services, so that a resumed run continues them.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import select
import socket
import stat
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from phalanx.config.option import load_entry_point
from phalanx.errors import UsageError, nearest
from phalanx.host.files import make_private, replace_file
from phalanx.observe.events import Event, Message, StepDone
from phalanx.observe.format import size
from phalanx.observe.guard import Guard, say_to_user

if TYPE_CHECKING:
    from phalanx.config import DistributedConfig

Result = TypeVar("Result")


@runtime_checkable
class Sink(Protocol):
    """A receiver of events: a file, a dashboard, a terminal."""

    def handle(self, event: Event) -> None:
        """Handle one event; called between training steps, so it must be quick."""

    def close(self) -> None:
        """Write what is pending and close everything."""


class EventStream:
    """The sinks of one rank. A sink that raises is reported once and dropped."""

    def __init__(self, sinks: Iterable[Sink] = (), rank: int = 0) -> None:
        self.rank = rank
        self._sinks = list(sinks)

    def add(self, sink: Sink) -> None:
        """Let a sink take the events from now on."""
        self._sinks.append(sink)

    def find(self, kind: type[Result]) -> Result | None:
        """Return the first sink of a kind, if there is one."""
        return next((sink for sink in self._sinks if isinstance(sink, kind)), None)

    @property
    def next_commands(self) -> list[str]:
        """What sinks propose to run after training, where they have an attribute `next_commands`."""
        return [command for sink in self._sinks for command in getattr(sink, "next_commands", ())]

    def emit(self, event: Event) -> None:
        """Give an event to every sink."""
        if not self._sinks:
            return
        if event.rank is None:
            event = dataclasses.replace(event, rank=self.rank)
        for sink in tuple(self._sinks):
            try:
                sink.handle(event)
            except Exception as error:  # noqa: BLE001 - whatever a logger breaks on, the run outlives it
                self._drop(sink, error)

    def close(self) -> None:
        """Close every sink; the stream takes nothing more."""
        for sink in tuple(self._sinks):
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - the trained model matters more than its log's last line
                self._drop(sink, error)
        self._sinks.clear()

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        # A full disk explains itself; a mistake in a sink is found by its lines.
        cause = f" {error}" if isinstance(error, OSError) else f"\n{traceback.format_exc(limit=-3)}"
        say_to_user(f"{type(sink).__name__} failed and gets no more events:{cause.rstrip()}")


class JsonlSink:
    """Appends every event to a file, one JSON object per line; a resumed run continues at the file's end."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        make_private(self.path.parent)
        last = b""
        if self.path.exists() and self.path.stat().st_size:
            with self.path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        if last not in (b"", b"\n"):
            self._file.write("\n")  # a killed writer's unfinished line must not run into the first one

    def handle(self, event: Event) -> None:
        """Write one line."""
        self._file.write(event.to_json() + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


EVENTS_FD = "PHALANX_EVENTS_FD"
"""The environment variable in which the launcher names the file descriptor."""

_WAIT_MS = 200


class FdSink:
    """Writes events to a datagram socket; stops when the other end is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket: socket.socket | None = connection
        self._too_large: set[str] = set()
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
        """Send an event. When the socket is full, step events are dropped and others wait for a short time."""
        if self._socket is None:
            return
        data = event.to_json().encode()
        if not self._send(event, data) and not isinstance(event, StepDone):
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            if poller.poll(_WAIT_MS):
                self._send(event, data)  # if another rank took the room, it is lost: better than a further delay

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, event: Event, data: bytes) -> bool:
        """Send an event; return False if the socket has no room now."""
        assert self._socket is not None
        try:
            self._socket.send(data)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                self._leave_out(event, len(data))
            elif isinstance(error, ConnectionError) or error.errno == errno.ENOTCONN:
                self.close()
            else:
                raise
        return True

    def _leave_out(self, event: Event, length: int) -> None:
        """Leave out an event that is larger than any datagram, with one notice for all of its kind."""
        if event.kind not in self._too_large:
            self._too_large.add(event.kind)
            text = f"events '{event.kind}' of {size(length)} are not shown here; the files of the run have them"
            self.handle(Message("warning", text, rank=event.rank))


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def announce(event: str, rank: int, text: str = "") -> None:
    """Send "joining" or "joined", where this rank enters or leaves its rendezvous, or "overdue" with what is late."""
    descriptor = os.environ.get(EVENTS_FD, "")
    if not descriptor.isdecimal():
        return
    with socket.socket(fileno=os.dup(int(descriptor))) as events:
        try:
            events.send(json.dumps({"event": event, "rank": rank, **({"text": text} if text else {})}).encode())
        except (BrokenPipeError, ConnectionResetError):
            return  # the launcher has ended, and this rank will be killed


_NAME = "tracking.json"


def read_tracking(run_dir: Path | None, service: str) -> str | None:
    """Return the id of the run in this folder at a service, where it has one."""
    return None if run_dir is None else _read(run_dir).get(service)


def write_tracking(run_dir: Path | None, service: str, run_id: str) -> None:
    """Keep the id of the run in this folder at a service."""
    if run_dir is not None:
        path, ids = run_dir / _NAME, _read(run_dir) | {service: run_id}
        Guard(str(path), say_to_user).attempt(lambda: replace_file(path, json.dumps(ids, indent=2) + "\n"))


def _read(run_dir: Path) -> dict[str, str]:
    path = run_dir / _NAME
    tracking = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {str(service): str(run_id) for service, run_id in tracking.items()}


SINKS_GROUP = "phalanx.sinks"


def check_sinks(config: DistributedConfig) -> None:
    """Refuse a name that no installed package has."""
    names = _names(config)
    if not names:
        return
    from importlib.metadata import entry_points  # 30 ms to import

    installed = sorted(entry_points(group=SINKS_GROUP).names)
    for name in names:
        if name not in installed:
            close = nearest(name, installed)
            guess = f" Did you mean {close!r}?" if close else ""
            raise UsageError(
                f"sinks = {config.sinks!r}: no installed package has a sink {name!r}.{guess}",
                hint=f"Installed: {', '.join(installed) or 'none'}. "
                f"A package adds one by an entry point in {SINKS_GROUP}.",
            )


def outside_sinks(config: DistributedConfig, run_dir: Path) -> list[Sink]:
    """Make the sinks that the setting names."""
    sinks: list[Sink] = []
    for name in _names(config):
        factory = load_entry_point(SINKS_GROUP, name)
        sink = factory(config, run_dir) if callable(factory) else factory
        if not isinstance(sink, Sink):
            raise UsageError(
                f"the entry point {name} in the group {SINKS_GROUP} gave {sink!r}, which is not a sink",
                hint="Let it name a function of (config, run_dir) that returns an object with the methods "
                "handle(event) and close().",
            )
        sinks.append(sink)
    return sinks


def _names(config: DistributedConfig) -> list[str]:
    return [name for part in (config.sinks or "").split(",") if (name := part.strip())]
