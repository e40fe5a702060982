"""The messages that a launcher receives from its ranks and from the fork server, as types.

On the wire a message is a JSON object. Its first key is the kind, with the first field as its value; the other fields
follow by their names: `{"exited": "r3", "code": -9, "time": 17.5}` is `ProcessExited("r3", code=-9, time=17.5)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class RankJoined(NamedTuple):
    """A rank is in its group and has the state of the run; `fixed`: why the number of ranks cannot change, if so."""

    generation: int
    fixed: str = ""


class RankInterrupted(NamedTuple):
    """A rank has noticed that others were lost, and has not left its group yet."""

    why: str


class RankAborted(NamedTuple):
    """A rank has aborted its collectives."""

    done: bool


class RankReady(NamedTuple):
    """A rank has left its group, or was started, and waits for a position."""

    why: str
    step: int


class ProcessStarted(NamedTuple):
    """The fork server has forked a process."""

    key: str
    pid: int


class ProcessExited(NamedTuple):
    """A process of the fork server has ended."""

    key: str
    code: int
    time: float


class ProcessRefused(NamedTuple):
    """The fork server could not fork a process."""

    key: str
    why: str


_KINDS: dict[str, type[Any]] = {
    "joined": RankJoined,
    "interrupted": RankInterrupted,
    "aborted": RankAborted,
    "ready": RankReady,
    "started": ProcessStarted,
    "exited": ProcessExited,
    "refused": ProcessRefused,
}


def parse(message: Mapping[str, Any]) -> Any:
    """Return a message as its type."""
    (kind, value), *fields = message.items()
    return _KINDS[kind](value, **dict(fields))
