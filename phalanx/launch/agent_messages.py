"""What a launcher and its store agent send each other, and what the agents of several nodes do.

A launcher asks (`Gather`, `WatchNodes`, `Lead`, `TakeIn`, `Post`); the agent answers with a `NodeInfo`, and then with
news. Agents send each other mail. Mail that an agent has no reader for is for the launcher: it leaves as a `Post`,
arrives as a `Mailed`, and agents pass it on as it is, since they do not load the rooms that know its kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.host.wire import Wire
from phalanx.launch.membership import Entry, Sign

# --- a launcher to its agent ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gather(Wire):
    """Gather the nodes for an attempt."""

    attempt: int


@dataclass(frozen=True)
class WatchNodes(Wire):
    """Watch other nodes from now on, by their entries; None: not any more."""

    nodes: Mapping[str, Entry | None]
    version: int
    """That of the view that says so."""


@dataclass(frozen=True)
class Lead(Wire):
    """Tell the other nodes that this one leads: enough of them have reported to it."""

    term: int


@dataclass(frozen=True)
class TakeIn(Wire):
    """Let nodes that have come late take part."""

    common: Mapping[str, Any]
    """The fields of a `NodeInfo` that are the same for all of them."""
    places: Mapping[str, Mapping[str, Any]]
    """Those that differ, by the node."""


@dataclass(frozen=True)
class Post(Wire, sealed=("message",)):
    """Send a message to the launcher of another node, to those of several, to `LEADER`, or to `ALL`."""

    to: str | tuple[str, ...]
    message: Any


# --- an agent to its launcher -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused(Wire):
    """This node cannot take part, or not any more: an error as data."""

    cause: str
    hint: str
    usage: bool


@dataclass(frozen=True)
class News(Wire):
    """A message about an attempt."""

    attempt: int
    message: Wire


@dataclass(frozen=True)
class Arrived(Wire):
    """So many nodes are present while they gather."""

    nodes: int


@dataclass(frozen=True)
class SilentNodes(Wire):
    """The nodes of a fixed number without a heartbeat at present, in words."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class CallsWanted(Wire):
    """A node asks for the collectives of this one's ranks."""

    number: int
    node: str
    is_own: bool
    """Whether it is this one that asks."""


@dataclass(frozen=True)
class Mailed(Wire):
    """The launcher of another node has sent a message."""

    sender: str
    message: Any


@dataclass(frozen=True)
class NodesLost(Wire):
    """Nodes have ended or cannot be reached; noticed by the leader's agent."""

    names: tuple[str, ...]
    ended: tuple[str, ...] = ()
    """Those whose launchers have certainly ended; any other one may only be out of reach."""


@dataclass(frozen=True)
class LeaderLost(Wire):
    """The node that led was lost, and another one leads: this one, if `address` (of a new store for ranks) is given."""

    leader: str
    address: tuple[str, int] | None = None
    term: int = 0
    """How many times the leader has changed, as this node has seen it."""
    ended: tuple[str, ...] = ()
    """The nodes whose launchers have certainly ended; any other one may only be out of reach."""
    gone: tuple[str, ...] = ()
    """Nodes that left before, which more than half of the others may not know: they count still."""
    new: tuple[str, ...] = ()
    """Nodes that came before, which more than half of the others may not know: they do not count yet."""
    host: str = ""
    """That of the node that was lost."""


# --- mail between agents that launchers hear of, too ------------------------------------------------------------------


@dataclass(frozen=True)
class NodeArrived(Wire):
    """A node has come late, and asks to take part."""

    name: str
    host: str
    slots: int
    """How many ranks it runs at most."""
    standby: tuple[str, int] | None = None
    """Where its store is, for the case that it leads."""


@dataclass(frozen=True)
class Agreed(Wire):
    """Enough nodes know a version of the view: none that has left it can go on without this one."""

    version: int


@dataclass(frozen=True)
class RemoteFailure(Wire):
    """Why a node stops."""

    failure: Mapping[str, Any]
    """Its `FailureReport`."""


@dataclass(frozen=True)
class Calls(Wire, sealed=("calls",)):
    """The collectives of a node's ranks, for the one that has asked for them."""

    number: int
    node_rank: int
    calls: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class AllEnded(Wire):
    """All ranks of a fixed number of nodes have succeeded."""


# --- other mail between agents ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TakenIn(Wire):
    """Nodes that have come late take part from now on: `TakeIn`, with what counts for a quorum."""

    common: Mapping[str, Any]
    places: Mapping[str, Mapping[str, Any]]
    gone: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Accused(Wire):
    """What a node has noticed of its neighbours."""

    signs: Mapping[str, Sign]


@dataclass(frozen=True)
class Known(Wire):
    """A node knows a version of the view."""

    version: int


@dataclass(frozen=True)
class Leads(Wire):
    """The node that took over leads: enough of the others have reported to it."""

    term: int


@dataclass(frozen=True)
class NodeFinished(Wire):
    """All ranks of a node, of a fixed number, have succeeded."""


@dataclass(frozen=True)
class AskCalls(Wire):
    """Send the collectives of your ranks."""

    number: int


# --- what a node finds in the store when the nodes have gathered ------------------------------------------------------


@dataclass(frozen=True)
class NodePlace(Wire):
    """The place of a node in the group."""

    node_rank: int
    first_rank: int
    num_nodes: int
    world_size: int
    run_id: str = ""
    """The name that the nodes agreed on for this launch: that of the leader's."""
    leader: str = ""
    master_port: int = 0
    list_at: tuple[str, int] | None = None
    """A node that has the list of all nodes, where not the leader is to be asked for it."""
