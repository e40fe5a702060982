"""What an attempt gives to the rooms that explain failures and replace lost ranks, and what it asks of them.

`phalanx.diagnosis` and `phalanx.recovery` implement the two protocols; the table of `phalanx.features` names them.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.launch.environment import NodeInfo
from phalanx.launch.group import RankGroup, RankState
from phalanx.launch.output import RankConsole
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.spec import LaunchSpec
from phalanx.launch.watches import Hang, StartWatch, Watch

Handlers = Mapping[type, Callable[[Any], None]]
"""By kind, what to do about a message of the store agent (`agent_messages`)."""


@dataclass
class LauncherContext:
    """Services of a launcher while its ranks run."""

    spec: LaunchSpec
    node: NodeInfo
    group: RankGroup
    console: RankConsole
    rendezvous: Rendezvous
    selector: selectors.BaseSelector
    later: Callable[[float, Callable[[], None]], None]
    fail: Callable[..., None]
    """Gets a `FailureReport`; with `final=True` this node alone ends, and does not start again."""
    is_stopping: Callable[[], bool]


class FailureSearch(Protocol):
    """Finds the cause of a failure, and calls the context's `fail` with it."""

    is_pending: bool
    """Whether a rank has failed, and its cause is not known yet."""
    is_asking: bool
    """Whether ranks were asked, and what they answer ends the attempt."""

    @property
    def watches(self) -> list[Watch]:
        """What depends on the clock."""

    @property
    def handlers(self) -> Handlers:
        """What to do about messages of the store agent."""

    def describe(self, state: RankState) -> str:
        """Return how a rank ended, as the end of a sentence that begins with its name."""

    def note_late(self, slot: int, text: str) -> None:
        """Note that a rank has waited too long for an operation that raises no error."""

    def assess(self, ended: RankState) -> None:
        """Find the cause after a rank has failed."""

    def find(self) -> None:
        """Look for the cause now."""

    def find_soon(self) -> None:
        """Look for the cause when other ranks have had the time to report theirs."""

    def name_missing(self, hang: Hang) -> None:
        """End the attempt because of ranks that never joined."""

    def describe_start(self, watch: StartWatch) -> None:
        """Say where the first rank is, while none has joined."""

    def close(self) -> None:
        """Close what it reads."""


class Recovery(Protocol):
    """Replaces lost ranks in place."""

    @property
    def watches(self) -> list[Watch]:
        """What depends on the clock."""

    @property
    def handlers(self) -> Handlers:
        """What to do about messages of the store agent."""

    @property
    def failures(self) -> int:
        """How many failures the run has survived."""

    def listen(self) -> None:
        """Handle messages of the ranks of this node, which have been started."""

    def on_loss(self, ended: RankState, how: str) -> bool:
        """Replace a rank that has ended with an error; return whether the run goes on."""

    def on_end(self, ended: RankState) -> None:
        """Note a rank that has finished."""

    def on_overdue(self) -> None:
        """Kill the rank that others have waited for too long over nccl."""

    def end(self) -> None:
        """Let ranks that wait for a place end: the attempt is over."""

    def all_ended(self) -> bool:
        """Whether the ranks of all nodes have ended; called when those of this one have."""
