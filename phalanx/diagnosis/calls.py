"""A rank's record of its collectives, as the launcher reads it in the log folder; the rank writes it in `answer`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.host.files import is_writable_for_others, open_below
from phalanx.host.processes import began_at, stat_fields
from phalanx.launch.rank_files import calls_path, process_path


@dataclass(frozen=True)
class Call:
    """One collective that a rank has entered."""

    group: str
    number: int
    """Its number among the calls in this group."""
    op: str
    detail: str
    """Shape and dtype."""
    where: str
    """The line that called it, such as train.py:88."""
    began: float
    done: bool
    bucket: int = 0
    """Which bucket of gradients it averages, from 1; 0 where that is not known."""
    peer: int | None = None
    """The rank at the other end of a point-to-point message, -1 for any; None for a collective."""

    @property
    def text(self) -> str:
        """Operation, shape and dtype."""
        return f"{self.op} of {self.detail}" if self.detail else self.op


@dataclass(frozen=True)
class RankCalls:
    """What is known of one rank when ranks are compared."""

    rank: int
    calls: tuple[Call, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of each group, by its name."""
    answered: bool = True
    """Whether `calls` are known: a rank that is stopped, was killed, or holds the interpreter lock does not answer."""
    waits: bool = False
    """Whether the stack of a rank that did not answer ends in a collective: on a busy machine it may be late."""
    failed: bool = False
    """Whether an error in a collective ended it: then the last call of each group may be marked as done and is not."""
    aborted: bool = False
    """Whether a library ended it because another size arrived than its collective expected."""
    position: str = ""
    """Where it is or how it ended, as the end of a sentence that begins with its name."""

    def to_message(self, limit: int) -> dict[str, Any]:
        """Return it as a message to another launcher, with at most `limit` of the latest calls in each group."""
        last = {call.group: call.number for call in self.calls}
        recent = [vars(call) for call in self.calls if call.number > last[call.group] - limit]
        return {**vars(self), "calls": recent, "groups": {name: list(ranks) for name, ranks in self.groups.items()}}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RankCalls:
        """Read back what `to_message` or a rank wrote."""
        calls = tuple(Call(**call) for call in message["calls"])
        groups = {name: tuple(ranks) for name, ranks in message["groups"].items()}
        return cls(**{**message, "calls": calls, "groups": groups})


def read_calls(log_dir: Path, slot: int, since: float = 0.0) -> RankCalls | None:
    """Return the record of a rank; None where it has written none since a time in seconds since the epoch."""
    try:
        message = json.loads(calls_path(log_dir, slot).read_text())
    except (FileNotFoundError, ValueError):  # none, or one that a full disk cut
        return None
    return RankCalls.from_message(message) if message.pop("time") >= since else None


def process_of(run_dir: Path, slot: int) -> int | None:
    """Return the process of a rank of this machine that runs, for a signal; None if it is not certain which that is.

    The record in the run's log folder must be that of the user whose process it is: others could name any process.
    """
    try:
        with open_below(run_dir, f"logs/{process_path(run_dir, slot).name}") as file:
            status, record = os.fstat(file.fileno()), json.load(file)
        pid, began, host = int(record["pid"]), int(record["began"]), record["host"]
        owner = os.stat(f"/proc/{pid}").st_uid
    except (OSError, ValueError, KeyError, TypeError):  # none, being written, of another user, or it has ended
        return None
    runs = began_at(pid) == began and stat_fields(pid)[:1] != ["Z"] and host == socket.gethostname()
    return pid if runs and owner == status.st_uid and not is_writable_for_others(status) else None
