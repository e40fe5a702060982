"""Ranks that are stuck: only their stacks show which one the others wait for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Protocol

from phalanx.diagnosis import Blame, Diagnosis
from phalanx.launch.context import LauncherContext
from phalanx.launch.group import RankState


class TrainingRanks(Protocol):
    """The ranks that a stall is looked for among."""

    @property
    def unchanged_since(self) -> float:
        """When they began to train in this group; infinity while it changes."""

    @property
    def members_here(self) -> list[RankState]:
        """Those of this node."""


class StallWatch:
    """Kills a rank that the others wait for without end, so that it is replaced; only stacks show which one it is."""

    def __init__(self, context: LauncherContext, diagnosis: Diagnosis) -> None:
        assert context.spec.elastic is not None, "only then ranks are replaced"
        self._limit = context.spec.elastic.stall_seconds
        self._group, self._evidence, self._console = context.group, diagnosis.evidence, context.console
        self._inquiry, self._report = diagnosis.inquiry, diagnosis.report
        self._asked = False
        self._ending: set[str] = set()

    def end(self, find: Callable[[], list[RankState]]) -> None:
        """Kill ranks that are stopped, and those that neither leave or join a group nor make progress.

        `find` returns them, and is asked again before a rank is killed: it may have gone on meanwhile.
        """
        silent = find()
        self._group.signal(signal.SIGKILL, [state for state in silent if state.stopped_since is not None])
        stuck = [state for state in silent if state.stopped_since is None and state.key not in self._ending]
        if stuck:
            self._ending |= {state.key for state in stuck}
            self._inquiry.ask_ranks(lambda _: self._kill([state for state in find() if state in stuck]), stuck)

    def _kill(self, stuck: list[RankState]) -> None:
        self._ending.clear()
        for state in stuck:
            where = self._evidence.position(state)
            state.killed_for = f"did not go on after other ranks were lost, and was killed: it was {where}"
        self._group.signal(signal.SIGKILL, stuck)

    def end_late(self, ranks: TrainingRanks) -> None:
        """Kill the rank that others have waited for too long over nccl; report it if it is not of this node."""
        if not self._asked and ranks.unchanged_since < time.monotonic():
            self._asked = True
            self._inquiry.find_blame(self._kill_blamed)

    def _kill_blamed(self, blame: Blame | None) -> None:
        self._asked = False
        guilty = [state for state in self._group.alive if blame is not None and state.rank == blame.rank]
        if blame is None or not guilty:
            self._report(blame)
            return
        self._evidence.late.clear()
        guilty[0].killed_for = f"{blame.cause}, and was killed"
        self._group.signal(signal.SIGKILL, guilty[:1])

    def check(self, ranks: TrainingRanks) -> None:
        """Ask for the stacks if no rank of the group has made progress for long."""
        since = ranks.unchanged_since
        if self._limit is None or self._asked or time.monotonic() - since < self._limit or not self._is_stalled(ranks):
            return
        self._asked = True
        self._inquiry.ask_ranks(lambda _: self._judge(ranks, since), ranks.members_here)

    def _is_stalled(self, ranks: TrainingRanks) -> bool:
        last = self._evidence.last_progress(ranks.members_here)
        return last is not None and self._limit is not None and time.time() - last >= self._limit

    def _judge(self, ranks: TrainingRanks, since: float) -> None:
        self._asked = False
        if ranks.unchanged_since != since or not self._is_stalled(ranks):  # a rank was replaced, or has gone on
            return
        for state, where in self._evidence.find_stalled(ranks.members_here):
            waited = f"made no step for {self._limit:g} s while others wait"
            self._console.notice(f"rank {state.rank} {waited}: it is {where}")
            self._group.signal(signal.SIGKILL, [state])
