"""Find the guilty rank: the earliest to fail, unless it failed only because it lost another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

YIELD_SECONDS = 0.5
"""How long a rank that lost its connection waits for another rank's real cause to come in."""

# What gloo, NCCL, the TCP store and plain sockets report when the peer was lost.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|aborted|refused)( by peer)?|broken pipe|closed by remote"
    r"|remote process (exited|has)|ncclRemoteError|NCCL communicator was aborted"
    r"|failed to recv, got 0 bytes|recvValue failed|sendBytes failed"
    r"|Horovod has been shut down|gloo.{0,40}connect"
    r"|socket (error|timeout|closed)|timed out waiting .{0,40}(recv|send|operation)|watchdog caught collective"
    # Phalanx's own collectives and parameter servers.
    r"|waited \d+ s in shared memory for|in shared memory$|exchange with rank \d+ broke off"
    r"|parameter server at \S+ has (not answered|been out of reach)|a rank was lost before the ranks could share",
    re.IGNORECASE,
)


def says_lost_peer(text: str) -> bool:
    """Whether an error's message says only that another rank was lost."""
    return _LOST_PEER.search(text) is not None


@dataclass(frozen=True)
class RankExit:
    """One rank's bad end, with what is known of it."""

    rank: int
    code: int
    """As `subprocess` has it: the exit status, or minus the signal's number."""
    time: float
    record: dict[str, Any] | None
    """What the rank wrote about its exception."""
    log_tail: tuple[str, ...]
    """The last lines of its log."""

    @property
    def when(self) -> float:
        """When it went wrong: the moment of the exception where there was one, else of the exit."""
        return float(self.record["time"]) if self.record else self.time

    @property
    def lost_peer(self) -> bool:
        """Whether it reports only that another rank was lost."""
        if self.record:
            return bool(_LOST_PEER.search(self.record["message"]))
        # A watchdog thread aborts the process without an exception of Python's.
        return self.code == -6 and any(_LOST_PEER.search(line) for line in self.log_tail)


def find_guilty(exits: Sequence[RankExit]) -> RankExit:
    """Return the rank to blame: real causes before lost connections, then the earliest."""
    return min(exits, key=lambda ended: (ended.lost_peer, ended.when, ended.rank))
