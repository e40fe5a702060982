"""What ranks, their launcher and the launchers of other nodes send each other when ranks are lost or added.

A rank talks to its launcher over its control socket. Launchers talk by mail (`phalanx.launch.mailbox`): those that
follow report what their ranks have sent, the one that leads sends orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.host.wire import Wire

# --- a rank to its launcher -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankJoined(Wire):
    """A rank is in its group and has the state of the run; `fixed`: why the number of ranks cannot change, if so."""

    generation: int
    fixed: str = ""


@dataclass(frozen=True)
class RankInterrupted(Wire):
    """A rank has noticed that others were lost, and has not left its group yet."""

    why: str


@dataclass(frozen=True)
class RankAborted(Wire):
    """A rank has aborted its collectives."""


@dataclass(frozen=True)
class RankReady(Wire):
    """A rank has left its group, or was started, and waits for a position; `step`: its last complete one."""

    why: str
    step: int
    reported: bool = False
    """Whether its group took a step, and so has reported why it was formed."""


# --- orders to a rank -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Abort(Wire):
    """Leave whatever collective you wait in."""

    why: str


@dataclass(frozen=True)
class Release(Wire):
    """All ranks have aborted: collectives over nccl may be ended."""


@dataclass(frozen=True)
class LeaveAtStep(Wire):
    """Leave at a step's boundary, for a change that was requested."""

    why: str


@dataclass(frozen=True)
class Position(Wire):
    """Take this place in the next group."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    generation: int
    term: int
    """How many times the leader has changed; with the generation the order of all groups."""
    began: float
    """When the change began, in seconds since the epoch by the leader's clock."""
    reason: str
    lost: tuple[int, ...] = ()
    failures: int = 0
    """How many the run has survived so far."""
    master_addr: str = ""
    """Where the store is, if it has moved."""
    master_port: int = 0


@dataclass(frozen=True)
class Place(Wire):
    """What of a `Position` differs between ranks of a group; the rest is sent once, before it (`CommonPosition`)."""

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int


@dataclass(frozen=True)
class Wait(Wire):
    """There is no place in the next group: wait for one."""


@dataclass(frozen=True)
class End(Wire):
    """End: the run goes on without you, or is over."""


# --- the view that all launchers share --------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeView(Wire):
    """A node as every launcher knows it."""

    host: str
    slots: int
    """How many ranks it runs at most."""
    standby: tuple[str, int] | None = None
    """Where its store is, for the case that it leads."""
    ranks: int = 0
    """How many ranks of the present group it runs; ranks are numbered node by node, in the order of their names."""
    losses: int = 0
    """How many of its ranks were lost lately."""


@dataclass(frozen=True)
class ViewChange(Wire):
    """What has changed in the view of the group that all launchers share."""

    version: int
    term: int
    generation: int
    failures: int
    nodes: Mapping[str, NodeView | None]
    """Nodes that came or changed; None: lost or left out."""
    whole: bool = False
    """Whether these are all nodes."""


# --- a launcher that follows, to the one that leads -------------------------------------------------------------------


@dataclass(frozen=True)
class FromRank(Wire):
    """A message of a rank."""

    key: str
    slot: int
    local_rank: int
    message: Wire


@dataclass(frozen=True)
class LostRank(Wire):
    """A rank has ended with an error. `how`: the end of a sentence that begins with "rank 3"."""

    key: str
    code: int
    how: str
    failure: Mapping[str, Any]
    """The whole report, for the case that the run ends because of it."""


@dataclass(frozen=True)
class FinishedRank(Wire):
    """A rank has finished."""

    key: str


@dataclass(frozen=True)
class NodeEnded(Wire):
    """All ranks of a node have ended."""


@dataclass(frozen=True)
class RankFacts(Wire):
    """A rank as its own launcher knows it, for a leader that takes over."""

    key: str
    slot: int
    rank: int
    local_rank: int
    code: int | None
    is_member: bool
    ready: RankReady | None


@dataclass(frozen=True)
class Hello(Wire):
    """The ranks of a node, for a leader that takes over; with it the node consents to be led."""

    ranks: tuple[RankFacts, ...]
    term: int
    """How many times the leader has changed, as the node has seen it."""
    version: int
    """The last change of the view that the node knows."""
    changes: tuple[ViewChange, ...] = ()
    """That change and some before it: the leader may have missed them."""


@dataclass(frozen=True)
class ResizeAsked(Wire):
    """A user asks this node for another number of ranks."""

    ranks: int


# --- the launcher that leads, to the others ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Orders(Wire):
    """Orders to ranks of one node, in one message, by the names of their processes."""

    orders: tuple[tuple[str, Wire], ...]


@dataclass(frozen=True)
class CommonPosition(Wire):
    """The next group, as the positions of all its ranks describe it: for 131,072 ranks one list of those lost."""

    position: Position
    """That of any rank."""


@dataclass(frozen=True)
class StartRanks(Wire):
    """Start processes for the next generation."""

    count: int
    generation: int


@dataclass(frozen=True)
class LateRank(Wire):
    """A rank does not leave or join: kill it, if it makes no progress either."""

    key: str


@dataclass(frozen=True)
class LeftOut(Wire):
    """The run goes on without this node."""

    why: str


@dataclass(frozen=True)
class ResizeAnswer(Wire):
    """Whether a request is carried out; `refused`: why not."""

    refused: str | None


@dataclass(frozen=True)
class RunOver(Wire):
    """The ranks of all nodes have ended."""
