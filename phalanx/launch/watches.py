"""Watches of a launcher: what depends on the clock. Those of a start: notices, and ranks that never join.

Others are `StallNotice` (`inquiry`) and, in an elastic run, `ElasticControl` (`elastic`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from phalanx.launch.forkserver.preload import extra_modules
from phalanx.launch.group import RankState
from phalanx.launch.launcher_loop import MOMENTS, Reminder, duration_text
from phalanx.launch.spec import LaunchSpec

IMPORT_MOMENTS = (15.0, *MOMENTS)
"""torch takes a few seconds from a local disk; from a cold network disk, far more."""
NODES_MOMENTS = (2.0, *MOMENTS)
"""The user has to start the other nodes: report early which are missing."""


class Watch(Protocol):
    """Something to look at when nothing happens."""

    @property
    def next_deadline(self) -> float | None:
        """When `check` may next have something to do; None: not before something else happens."""

    def check(self, now: float) -> None:
        """Do what is due; called after every round of events, and at the deadline at the latest."""


class StartupNotices:
    """First torch is imported, then the nodes gather, then the ranks are forked. Each phase has its own clock."""

    def __init__(self, spec: LaunchSpec, now: float, notice: Callable[[str], None], *, serving: bool) -> None:
        self._notice = notice
        self._endpoint = spec.rdzv_endpoint
        self._num_nodes = spec.num_nodes
        self._imports = " and ".join(["torch", *extra_modules(spec.env)[:1]])
        # Node 0 is at the endpoint itself.
        self._arrived = 1 if spec.node_rank == 0 else 0
        self._serving = False
        self._reminder: Reminder | None = Reminder(now, IMPORT_MOMENTS)
        if serving:
            self.on_serving(now)

    def on_serving(self, now: float) -> None:
        """Note that the fork server has answered: torch is imported."""
        if not self._serving:
            self._serving = True
            self._reminder = Reminder(now, NODES_MOMENTS if self._num_nodes > 1 else MOMENTS)

    def on_arrived(self, nodes: int, now: float) -> None:
        """Note how many nodes have come to the endpoint, this one included; a notice follows soon."""
        changed = 1 < nodes != self._arrived
        self._arrived = nodes
        if changed:
            self._reminder = Reminder(now, NODES_MOMENTS)

    def on_gathered(self, now: float) -> None:
        """Note that all nodes are here."""
        self._arrived = self._num_nodes
        if self._serving:
            self._reminder = Reminder(now, MOMENTS)

    def end(self) -> None:
        """Note that the ranks run: from here on they report progress."""
        self._reminder = None

    @property
    def activity(self) -> str:
        """The phase, as the end of a sentence: "importing torch", "waiting for 1 of 2 nodes at node0:29400"."""
        if not self._serving:
            return f"importing {self._imports}"
        missing = self._num_nodes - max(self._arrived, 1)
        if self._num_nodes == 1 or missing <= 0:
            return "starting the ranks"
        silent = "" if self._arrived else " (no answer there yet)"
        return f"waiting for {missing} of {self._num_nodes} nodes at {self._endpoint}{silent}"

    @property
    def next_deadline(self) -> float | None:
        """When the next notice may be due."""
        return None if self._reminder is None else self._reminder.next_moment

    def check(self, now: float) -> None:
        """Give the notice that is due now, if any."""
        if self._reminder is not None and self._reminder.is_due(now):
            waits = self.activity.startswith("waiting")
            waited = duration_text(now - self._reminder.began)
            self._notice(self.activity if waits else f"still {self.activity} after {waited}")


@dataclass(frozen=True)
class Hang:
    """Ranks for which others wait, and how long these have waited."""

    missing: tuple[int, ...]
    waited: float
    none_came: bool = False


@dataclass
class StartWatch:
    """Finds ranks that never join, from starts, events and exits. Limits count from when the last rank was forked."""

    spec: LaunchSpec
    ranks: tuple[int, ...]
    world_size: int
    on_hang: Callable[[Hang], None]
    on_slow: Callable[[StartWatch], None]
    """Called when no rank has come for long, and again at growing intervals."""
    _begun: set[int] = field(default_factory=set)
    _all_begun: float | None = None
    _rounds: dict[int, int] = field(default_factory=dict)
    _waiting: dict[int, float] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _reminder: Reminder | None = None

    def on_process(self, state: RankState, now: float) -> None:
        """Note that a rank has been forked, has ended, or could not be started."""
        self._begun.add(state.slot)
        if self._all_begun is None and len(self._begun) == len(self.ranks):
            self._all_begun = now
            self._reminder = Reminder(now)
        if not state.alive:
            self._ended.add(state.slot)
            self._waiting.pop(state.slot, None)

    def on_event(self, event: dict[str, Any], now: float) -> None:
        """Note a rank entering or leaving init_process_group."""
        rank = event.get("rank")
        if not isinstance(rank, int):
            return
        if event["event"] == "joining":
            self._rounds[rank] = self._rounds.get(rank, 0) + 1
            self._waiting[rank] = now
        elif event["event"] == "joined":
            self._waiting.pop(rank, None)

    @property
    def quiet(self) -> bool:
        """Whether no rank has reached init_process_group or ended yet."""
        return not self._rounds and not self._ended

    @property
    def _start_deadline(self) -> float | None:
        if not self.quiet or self._all_begun is None or self.spec.start_timeout is None:
            return None
        return self._all_begun + self.spec.start_timeout

    @property
    def _join_deadline(self) -> float | None:
        if not self._waiting or self._all_begun is None or self.spec.join_timeout is None:
            return None
        return max(self._all_begun, min(self._waiting.values())) + self.spec.join_timeout

    @property
    def _notice_moment(self) -> float | None:
        # A rank alone need not join anything.
        return self._reminder.next_moment if self._reminder and self.quiet and self.world_size > 1 else None

    @property
    def next_deadline(self) -> float | None:
        """When a limit or a notice may next be due."""
        deadlines = (self._start_deadline, self._join_deadline, self._notice_moment)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def check(self, now: float) -> None:
        """Report the missing ranks once a rank has waited too long, or that all are slow."""
        if self._start_deadline is not None and now >= self._start_deadline:
            self.on_hang(Hang(self.ranks, self.spec.start_timeout or 0.0, none_came=True))
        elif self._join_deadline is not None and now >= self._join_deadline:
            rounds = max(self._rounds.values())
            missing = tuple(rank for rank in self.ranks if self._rounds.get(rank, 0) < rounds)
            self.on_hang(Hang(missing, self.spec.join_timeout or 0.0))
        elif self._notice_moment is not None and self._reminder is not None and self._reminder.is_due(now):
            self.on_slow(self)

    def waited(self, now: float) -> float:
        """Return for how long all ranks have been running."""
        return 0.0 if self._all_begun is None else now - self._all_begun
