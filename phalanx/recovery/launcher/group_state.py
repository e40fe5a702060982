"""The group of a run: its ranks, spare ranks, and how it changes from one generation to the next.

    running --a rank is lost, or one is added--> leaving --all are ready--> forming --all have joined--> running

*leaving*: ranks abort the collective that they wait in, or stop at a step's boundary, and report their last step.
*forming*: each rank got its new position and joins the group of the next generation. A loss in either state begins
*leaving* again. `membership` decides when; `phalanx.recovery.ranks.member` is the ranks' side.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from phalanx.launch.group import RankState
from phalanx.launch.spec import Elastic
from phalanx.recovery.launcher.policy import Change, Sizes


class Processes(Protocol):
    """The processes of all machines, as `Membership` uses them."""

    def send(self, state: RankState, message: dict[str, Any]) -> None:
        """Send a message to a rank; one that has ended is reported as lost by another way."""

    def start(self, count: int, generation: int) -> dict[str, int]:
        """Start processes that will report that they are ready; return how many could be started on each machine."""

    def retire(self, state: RankState) -> None:
        """Forget a process that has ended."""

    def address(self) -> dict[str, Any]:
        """Return where the ranks' store is, as fields of a position."""


class GroupState:
    """Which processes are ranks, which wait for a place, and what the ranks have reported of the present change."""

    def __init__(
        self, elastic: Elastic, members: Iterable[RankState], processes: Processes, generation: int = 0
    ) -> None:
        """`generation`: of a group that another launcher has formed; its members hold the state of the run."""
        self._processes = processes
        self._kept_spares = elastic.spares
        self.members = list(members)
        self.spares: list[RankState] = []
        self.starting: Counter[str] = Counter()
        """How many processes of each machine have not reported yet that they are ready."""
        self.size = len(self.members)
        """How many ranks the next generation has."""
        self.sizes = Sizes(elastic.sizes)
        self.generation = generation
        self.state: Literal["starting", "running", "leaving", "forming"] = "running" if generation else "starting"
        self.since = time.monotonic()
        self.change: Change | None = None
        self.steps: dict[str, int] = {}
        """The last step of each process that is ready for the next generation."""
        self._joined, self._aborted = set[str](), set[str]()
        self.holders = {member.key for member in self.members} if generation else set()
        """Ranks that were in the last group, and so hold the state of the run."""

    @property
    def present(self) -> int:
        """All processes, also those that are only starting."""
        return len(self.members) + len(self.spares) + sum(self.starting.values())

    @property
    def missing(self) -> int:
        """How many more ranks the next generation has."""
        return self.size - len(self.members)

    @property
    def able(self) -> list[RankState]:
        """Spare ranks that are ready to take a place."""
        return [state for state in self.spares if state.key in self.steps]

    @property
    def is_ready(self) -> bool:
        """Whether all ranks have left the last group, and there are enough for the next one."""
        left = self.state == "leaving" and all(member.key in self.steps for member in self.members)
        return left and self.missing <= len(self.able)

    @property
    def is_settled(self) -> bool:
        """Whether the ranks train, and none is being added."""
        return self.state == "running" and self.change is None

    @property
    def unchanged_since(self) -> float:
        """When the ranks began to train in this group, by the monotonic clock; infinity while it changes."""
        return self.since if self.is_settled else math.inf

    @property
    def spares_only(self) -> bool:
        """Whether all ranks have ended, and only spare ranks are left."""
        return all(member.code is not None for member in self.members)

    @property
    def unfinished(self) -> list[RankState]:
        """The ranks that have not yet left, or joined, in a change that follows from a loss."""
        if self.state not in ("leaving", "forming") or (self.change and self.change.requested):
            return []
        done = set(self.steps) if self.state == "leaving" else self._joined
        if self.state == "leaving" and not self._all_aborted:  # those who have wait for the others, to be released
            done |= self._aborted
        return [member for member in self.members if member.key not in done]

    @property
    def _all_aborted(self) -> bool:
        return all(member.key in self._aborted or member.key in self.steps for member in self.members)

    # --- what ranks report --------------------------------------------------------------------------------------

    def take_ready(self, state: RankState, step: int) -> None:
        """Note that a rank has left its group, or that a new one has started."""
        self.steps[state.key] = step
        if state not in self.members and state not in self.spares:
            self.spares.append(state)
            self.starting -= Counter([state.node])  # not below zero

    def take_aborted(self, state: RankState) -> None:
        """Let ranks end nccl's collectives once all have aborted: none of them uses what those leave then."""
        if self.state != "leaving":  # its group has been left since
            return
        self._aborted.add(state.key)
        if self._all_aborted:
            for member in self.members:
                self._processes.send(member, {"release": True})

    def take_joined(self, state: RankState) -> bool:
        """Note that a rank is in the present group; return True when it was the last one."""
        self._joined.add(state.key)
        self.holders.add(state.key)
        waits = self.state in ("starting", "forming")  # else one that has joined was lost meanwhile
        if not waits or any(member.key not in self._joined for member in self.members):
            return False
        self._enter("running")
        return True

    # --- transitions --------------------------------------------------------------------------------------------

    def _enter(self, state: Literal["running", "leaving", "forming"]) -> None:
        self.state, self.since = state, time.monotonic()

    def leave(self, why: str, lost: Sequence[int] = ()) -> None:
        """Let all ranks leave what they wait in."""
        change = self.change = self.change or Change(time.time())
        if lost and not change.lost:
            change.reasons.clear()  # what ranks noticed before the loss was known
        change.reasons.append(why)
        change.lost += lost
        if self.state != "leaving":
            self._forget_steps()
        if self.state != "leaving" or change.requested or lost:  # ranks have time from now on
            self._enter("leaving")
        change.requested = False
        self._aborted.clear()
        for member in self.members:
            if member.key not in self.steps:
                self._processes.send(member, {"abort": why})

    def request(self, size: int, why: str) -> None:
        """Note that the group is to have another number of ranks, when those are ready."""
        self.size, self.change = size, Change(time.time(), [why], requested=True)

    def drop_request(self) -> None:
        """Keep the number of ranks after all."""
        self.size, self.change = len(self.members), None

    def leave_at_a_step(self) -> None:
        """Let all ranks leave at a step's boundary, for a change that was requested."""
        assert self.change is not None, "a request is a change"
        self._enter("leaving")
        self._forget_steps()
        for member in self.members:
            self._processes.send(member, {"regroup": self.change.reasons[-1]})

    def _forget_steps(self) -> None:
        own = {member.key for member in self.members}
        self.steps = {key: step for key, step in self.steps.items() if key not in own}

    def dismiss(self, state: RankState) -> None:
        """Let a rank end: the run goes on without it."""
        state.dismissed = True
        self._processes.send(state, {"end": True})

    def end(self) -> None:
        """Let ranks that wait for the next generation end: there will be none."""
        for state in (*self.spares, *self.members):
            self._processes.send(state, {"end": True})

    def form(self, failures: int) -> None:
        """Begin the next generation: each chosen rank gets its position."""
        chosen = (self.members + self.able)[: self.size]
        self._set_aside(chosen)
        self.generation += 1
        self._joined.clear()
        self._enter("forming")
        change, self.change = self.change or Change(time.time()), None
        nodes = {node: _numbered([s for s in chosen if s.node == node]) for node in sorted({s.node for s in chosen})}
        self.members = [state for states in nodes.values() for state in states]
        for rank, state in enumerate(self.members):
            self.steps.pop(state.key, None)
            state.rank, state.local_rank = rank, nodes[state.node].index(state)
            position = {
                "rank": rank,
                "local_rank": state.local_rank,
                "world_size": self.size,
                "local_world_size": len(nodes[state.node]),
                "node_rank": list(nodes).index(state.node),
                "generation": self.generation,
                "failures": failures,
                "began": change.began,
                "reason": "; ".join(change.reasons),
                "lost": change.lost,
                **self._processes.address(),
            }
            self._processes.send(state, {"form": position})

    def _set_aside(self, chosen: list[RankState]) -> None:
        """Let ranks without a place wait, as far as the run may use them; the others end, and free their memory."""
        self.holders &= {member.key for member in self.members}
        rest = [state for state in self.spares + self.members if state not in chosen]
        kept = max(self._kept_spares, self.sizes.most - self.size)
        self.spares = rest[:kept]
        for state in rest[:kept]:
            state.dismissed = False
            self._processes.send(state, {"wait": True})
        for state in rest[kept:]:
            self.dismiss(state)


def _numbered(states: list[RankState]) -> list[RankState]:
    """Return a machine's ranks in their new order: each keeps its number where possible, for its device's sake."""
    kept = {state.local_rank: state for state in states if state.local_rank < len(states)}
    rest = iter([state for state in states if kept.get(state.local_rank) is not state])
    return [kept[number] if number in kept else next(rest) for number in range(len(states))]
