"""The messages that a launcher receives from its ranks, the fork server and the store agent, as types.

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


class NodesArrived(NamedTuple):
    """How many machines have come to the endpoint."""

    nodes: int


class NodesGathered(NamedTuple):
    """All machines are there; this one's position, as fields of `NodeInfo`."""

    node: dict[str, Any]


class RemoteFailure(NamedTuple):
    """Another machine has failed; the fields of its `FailureReport`."""

    failure: dict[str, Any]


class LauncherMail(NamedTuple):
    """A message of another launcher, for this one's role."""

    mail: dict[str, Any]


class NodesLost(NamedTuple):
    """Machines that were lost: their hosts by their keys."""

    hosts: dict[str, str]


class LeaderLost(NamedTuple):
    """The machine that decided was lost; `address`: of the new store, where this machine is the next to decide."""

    leader: str
    lost: dict[str, str]
    others: tuple[str, ...] = ()
    address: tuple[str, int] | None = None


class CallsAsked(NamedTuple):
    """A launcher, `own`: this one, asks for the collectives of all ranks."""

    number: int
    own: bool


class CallsAnswered(NamedTuple):
    """What the ranks of another machine have called."""

    answer: dict[str, Any]


class NodesSilent(NamedTuple):
    """Machines without a heartbeat at present."""

    hosts: list[str]


class AllNodesEnded(NamedTuple):
    """The ranks of all machines have ended successfully."""

    done: bool


class AgentFailed(NamedTuple):
    """The store agent has ended, and with it the connection to the others; `usage`: a mistake of the user's."""

    error: str
    hint: str
    usage: bool


_KINDS: dict[str, type[Any]] = {
    "joined": RankJoined,
    "interrupted": RankInterrupted,
    "aborted": RankAborted,
    "ready": RankReady,
    "started": ProcessStarted,
    "exited": ProcessExited,
    "refused": ProcessRefused,
    "arrived": NodesArrived,
    "node": NodesGathered,
    "remote_failure": RemoteFailure,
    "mail": LauncherMail,
    "lost_nodes": NodesLost,
    "leader": LeaderLost,
    "question": CallsAsked,
    "answer": CallsAnswered,
    "silent_nodes": NodesSilent,
    "all_ended": AllNodesEnded,
    "error": AgentFailed,
}


def parse(message: Mapping[str, Any]) -> Any:
    """Return a message as its type."""
    (kind, value), *fields = message.items()
    return _KINDS[kind](value, **dict(fields))
