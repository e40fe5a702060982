"""What happens to a launcher (events), and what it does about it (actions), as data.

`node.Node` turns events into actions, and has no socket, thread, file or clock; `control.ElasticControl` finds out what
happens and carries the actions out. What the store agent reports is an event as it comes (`launch.agent_messages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.host.wire import Wire
from phalanx.launch.agent_messages import Agreed, Lead, LeaderLost, Mailed, NodeArrived, NodesLost
from phalanx.recovery.messages import NodeView


@dataclass(eq=False)
class Rank:
    """A process of the run, as a launcher that decides knows it."""

    key: str
    node: str
    slot: int
    """The number in the names of its files."""
    rank: int
    local_rank: int = 0
    code: int | None = None
    """How it ended; None while it runs."""
    dismissed: bool = False
    """Whether it was asked to end, because the run goes on without it."""

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self.code is None


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankSpoke:
    """A rank of this node has sent a message."""

    key: str
    message: Wire


@dataclass(frozen=True)
class RankStarted:
    """A process for the next generation was started here."""

    key: str
    slot: int
    local_rank: int


@dataclass(frozen=True)
class RankCrashed:
    """A rank of this node has ended with an error; `failure`: the report about it."""

    key: str
    code: int
    how: str
    failure: Mapping[str, Any]


@dataclass(frozen=True)
class RankFinished:
    """A rank of this node has ended well."""

    key: str


@dataclass(frozen=True)
class AllHereEnded:
    """All processes of this node have ended."""


@dataclass(frozen=True)
class Resized:
    """A user asks this node for another number of ranks."""

    ranks: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class FillDue:
    """The pause before lost ranks are replaced is over."""


@dataclass(frozen=True)
class ArrivalsDue:
    """Nodes that have come late within a moment can be taken in together."""


Event = (
    RankSpoke
    | RankStarted
    | RankCrashed
    | RankFinished
    | AllHereEnded
    | Mailed
    | NodeArrived
    | NodesLost
    | Agreed
    | LeaderLost
    | Resized
    | Tick
    | FillDue
    | ArrivalsDue
)


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deliver:
    """Pass an order on to a rank of this node."""

    key: str
    order: Wire


@dataclass(frozen=True)
class Start:
    """Start processes here."""

    count: int
    generation: int


@dataclass(frozen=True)
class Retire:
    """Forget a process of this node that has ended."""

    key: str


@dataclass(frozen=True)
class EndHere:
    """Let all processes of this node end, also those that are only starting."""


@dataclass(frozen=True)
class Send:
    """Send a message to the launcher of another node, to those of several, or to `ALL`."""

    to: str | tuple[str, ...]
    message: Wire


@dataclass(frozen=True)
class Accept:
    """Let nodes that have come late take part; `places`: for each the fields of its `NodeInfo` that differ."""

    places: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class NodesChanged:
    """Watch these nodes from now on; None: not any more."""

    nodes: Mapping[str, NodeView | None]
    version: int = 0
    """That of the view that says so."""


@dataclass(frozen=True)
class Tell:
    """Show an event to the user."""

    event: dict[str, Any]


@dataclass(frozen=True)
class Later:
    """Give this event back after some seconds."""

    seconds: float
    event: FillDue | ArrivalsDue


@dataclass(frozen=True)
class GiveUp:
    """End the attempt for this cause. `alone`: this node leaves, and the others go on."""

    cause: str
    alone: bool = False


@dataclass(frozen=True)
class Unsurvived:
    """A lost rank ends the attempt: its error is the cause. `failure`: the report, if it was of another node."""

    failure: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class AnswerRequest:
    """Answer a user's request for another number of ranks; `refused`: why it is not carried out."""

    refused: str | None


@dataclass(frozen=True)
class AllOver:
    """The ranks of all nodes have ended."""


Action = (
    Deliver
    | Start
    | Retire
    | EndHere
    | Send
    | Accept
    | NodesChanged
    | Lead
    | Tell
    | Later
    | GiveUp
    | Unsurvived
    | AnswerRequest
    | AllOver
)
