"""Which processes are the ranks of a run while it runs: lost ones are replaced, and the others keep their processes.

    running --a rank is lost, or one is added--> leaving --all are ready--> forming --all have joined--> running

*leaving*: ranks abort the collective that they wait in, or stop at a step's boundary, and report their last step.
*forming*: each rank got its new position and joins the group of the next generation. A loss in either state begins
*leaving* again. `phalanx.world.membership` is the ranks' side. With several machines one launcher decides for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from phalanx.launch.group import RankState
from phalanx.launch.policy import Decision, Facts, decide, pause
from phalanx.launch.spec import Elastic
from phalanx.observe.events import Message, RankLost

_PATIENCE = 6.0
"""So many times longer than a stopped process is waited for one that may be in a long step."""
_LEAST_PATIENCE = 30.0


class Processes(Protocol):
    """The processes of all machines, as `Membership` uses them."""

    def send(self, state: RankState, message: dict[str, Any]) -> None:
        """Send a message to a rank; one that has ended is reported as lost by another way."""

    def start(self, count: int, generation: int) -> int:
        """Start processes that will report that they are ready; return how many could be started."""

    def retire(self, state: RankState) -> None:
        """Forget a process that has ended."""

    def address(self) -> dict[str, Any]:
        """Return where the ranks' store is, as fields of a position."""


@dataclass
class _Change:
    """Why the group changes, for the event that reports it."""

    began: float
    reasons: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


class Membership:
    """Decides which processes are ranks, and in which order."""

    def __init__(
        self,
        elastic: Elastic,
        members: Iterable[RankState],
        processes: Processes,
        *,
        failures: int,
        max_restarts: int,
        later: Callable[[float, Callable[[], None]], None],
        report: Callable[[dict[str, Any]], None],
        generation: int = 0,
    ) -> None:
        """`generation`: of a group that another launcher has formed; its members hold the state of the run."""
        self._elastic, self._processes = elastic, processes
        self._max_restarts = max_restarts
        self.failures = failures
        self._later, self._report = later, report
        self._members = list(members)
        self._spares: list[RankState] = []
        self._state: Literal["starting", "running", "leaving", "forming"] = "running" if generation else "starting"
        self._steps: dict[str, int] = {}
        """The last step of each process that is ready for the next generation."""
        self._joined: set[str] = set()
        self._holders = {member.key for member in self._members} if generation else set()
        """Processes that have been in a group, and so hold the state of the run."""
        self._size = len(self._members)
        self.generation = generation
        self._starting = 0
        self._change: _Change | None = None
        self._since = time.monotonic()
        self._last_step = -1
        self._stuck = 0

    @property
    def members(self) -> list[RankState]:
        """The ranks, in their order."""
        return list(self._members)

    # --- what arrives -------------------------------------------------------------------------------------------

    def take(self, state: RankState, message: dict[str, Any]) -> None:
        """Take a message of a rank: it has joined its group, or is ready for the next one."""
        if "joined" in message and message["joined"] == self.generation:
            self._joined.add(state.key)
            self._holders.add(state.key)
            if all(member.key in self._joined for member in self._members):
                self._enter("running")
                self._keep_spares()
        elif "ready" in message:
            # It noticed before the launcher. In the state leaving, what it reports now would else be forgotten.
            if self._state in ("running", "forming") and state in self._members:
                self._leave(f"rank {state.rank} was interrupted: {message['ready'][:200]}")
            self._steps[state.key] = message["step"]
            if state not in self._members and state not in self._spares:
                self._spares.append(state)
                self._starting = max(0, self._starting - 1)
            self._form_if_all_ready()

    def take_loss(self, *ended: RankState, how: str, replaceable: bool = True) -> bool:
        """Take ranks that were lost together; return whether the run goes on without a restart.

        `how`: the end of a sentence that begins with "rank 3". `replaceable`: not where a machine was lost.
        """
        for state in ended:
            self._steps.pop(state.key, None)
            state.code = -1 if state.code is None else state.code
        spares = [state for state in ended if state in self._spares]
        lost = [state for state in ended if state in self._members]
        for state in ended:
            if state not in lost:
                self._processes.retire(state)
        self._spares = [state for state in self._spares if state not in spares]
        self._starting = max(0, self._starting - (len(ended) - len(spares) - len(lost)))  # lost before they were ready
        if not lost:
            self._later(pause(self._stuck), self._fill)
            return True
        if self._state == "starting":
            return False
        self.failures += 1
        decision = decide(self._facts(lost, replaceable))
        if decision.kind == "give_up":
            self._say(f"rank {lost[0].rank} {how}; no recovery in place: {decision.why}")
            return False
        for state in lost:
            self._processes.retire(state)
        self._execute(decision, lost, how)
        return True

    def _facts(self, lost: list[RankState], replaceable: bool) -> Facts:
        others = [state for state in (*self._members, *self._spares) if state not in lost and state.code is None]
        return Facts(
            lost=[state.code or 0 for state in lost],
            present=sum(state.key in self._holders for state in others),
            spares=len(self._spares),
            size=self._size,
            sizes=self._elastic.sizes,
            ended=sum(member.code is not None and member not in lost for member in self._members),
            failures=self.failures,
            max_restarts=self._max_restarts,
            without_progress=self._stuck,
            missing=len(lost),
            replaceable=replaceable,
        )

    def _execute(self, decision: Decision, lost: list[RankState], how: str) -> None:
        for state in lost:
            self._members.remove(state)
            self._report(RankLost(state.rank, how, decision.kind, decision.size, decision.why).to_dict())
        self._size = decision.size
        ranks = ", ".join(f"rank {state.rank}" for state in lost)
        self._leave(f"{ranks} {how}", [state.rank for state in lost])
        self._later(decision.pause, self._fill)

    def _say(self, text: str) -> None:
        self._report(Message("warning", text).to_dict())

    def _fill(self) -> None:
        """Start what is missing; spare ranks, which have loaded everything already, come first."""
        missing = self._size - len(self._members) - len(self._spares) - self._starting
        if missing > 0:
            self._starting += self._processes.start(missing, self.generation + 1)
        self._form_if_all_ready()

    def _keep_spares(self) -> None:
        missing = self._elastic.spares - len(self._spares) - self._starting
        if missing > 0:
            started = self._processes.start(missing, self.generation + 1)
            self._starting += started
            if started < missing:
                self._say(f"{self._elastic.spares} spare ranks were asked for, and {missing - started} are missing")

    # --- transitions --------------------------------------------------------------------------------------------

    def _enter(self, state: Literal["running", "leaving", "forming"]) -> None:
        self._state, self._since = state, time.monotonic()

    def _leave(self, why: str, lost: Sequence[int] = ()) -> None:
        """Let all ranks leave what they wait in."""
        self._change = self._change or _Change(time.time())
        if lost and not self._change.lost:
            self._change.reasons.clear()  # what ranks noticed before the loss was known
        self._change.reasons.append(why)
        self._change.lost += lost
        if self._state != "leaving":
            self._enter("leaving")
            self._forget_steps()
        for member in self._members:
            if member.key not in self._steps:
                self._processes.send(member, {"abort": why})

    def _forget_steps(self) -> None:
        own = {member.key for member in self._members}
        self._steps = {key: step for key, step in self._steps.items() if key not in own}

    @property
    def unchanged_since(self) -> float:
        """When the ranks began to train in this group, by the monotonic clock; infinity while it changes."""
        return self._since if self.is_settled else math.inf

    @property
    def is_settled(self) -> bool:
        """Whether the ranks train, and none is being added."""
        return self._state == "running" and self._change is None

    def resize(self, size: int, why: str) -> str | None:
        """Change the number of ranks at a step's boundary; return why that is not possible, if so."""
        if size not in self._elastic.sizes:
            allowed = ", ".join(str(each) for each in sorted(self._elastic.sizes))
            return f"{size} ranks are not possible here. Possible: {allowed}."
        if size == len(self._members):
            return None
        self._size = size
        self._change = _Change(time.time(), [why])
        if size > len(self._members):
            self._fill()  # new ranks get ready while the others train
        else:
            self._ask_to_leave()
        return None

    def take_arrival(self, ranks: int, who: str) -> None:
        """Take in ranks of a machine that has arrived, as many as the run can use."""
        most = next((size for size in self._elastic.sizes if size <= len(self._members) + ranks), 0)
        if most > len(self._members) and self.is_settled:
            self._size = most
            self._change = _Change(time.time(), [f"{who} arrived"])
        self._starting += ranks

    def _ask_to_leave(self) -> None:
        assert self._change is not None, "a request is a change"
        self._enter("leaving")
        self._forget_steps()
        for member in self._members:
            self._processes.send(member, {"regroup": self._change.reasons[-1]})

    def _form_if_all_ready(self) -> None:
        able = [state for state in self._spares if state.key in self._steps]
        missing = self._size - len(self._members)
        if self._state == "running":
            if self._change is not None and 0 < missing <= len(able):  # those who were added are ready
                self._ask_to_leave()
            return
        if self._state != "leaving" or any(member.key not in self._steps for member in self._members):
            return
        if missing > len(able):
            return
        step = max((self._steps[member.key] for member in self._members), default=-1)
        self._stuck = self._stuck + 1 if step <= self._last_step else 0
        self._last_step = max(step, self._last_step)
        chosen = (self._members + able)[: self._size]
        self._spares = [state for state in self._members + self._spares if state not in chosen]
        self._form(chosen)

    def _form(self, chosen: list[RankState]) -> None:
        self.generation += 1
        self._joined.clear()
        self._enter("forming")
        change, self._change = self._change or _Change(time.time()), None
        nodes = {node: _numbered([s for s in chosen if s.node == node]) for node in sorted({s.node for s in chosen})}
        self._members = [state for states in nodes.values() for state in states]
        for rank, state in enumerate(self._members):
            self._steps.pop(state.key, None)
            state.rank, state.local_rank = rank, nodes[state.node].index(state)
            position = {
                "rank": rank,
                "local_rank": state.local_rank,
                "world_size": self._size,
                "local_world_size": len(nodes[state.node]),
                "node_rank": list(nodes).index(state.node),
                "generation": self.generation,
                "began": change.began,
                "reason": "; ".join(change.reasons),
                "lost": change.lost,
                **self._processes.address(),
            }
            self._processes.send(state, {"form": position})

    # --- silence ------------------------------------------------------------------------------------------------

    def find_late(self) -> list[RankState]:
        """Return ranks that do not leave or join for too long."""
        late = time.monotonic() - self._since > max(_LEAST_PATIENCE, _PATIENCE * self._elastic.silence_seconds)
        if self._state not in ("leaving", "forming") or not late:
            return []
        done = self._steps.keys() if self._state == "leaving" else self._joined
        return [member for member in self._members if member.key not in done]

    def end(self) -> None:
        """Let ranks that wait for the next generation end: there will be none."""
        for state in (*self._spares, *self._members):
            self._processes.send(state, {"end": True})

    @property
    def spares_only(self) -> bool:
        """Whether all members have ended, and only spare ranks are left."""
        return all(member.code is not None for member in self._members)


def _numbered(states: list[RankState]) -> list[RankState]:
    """Return a machine's ranks in their new order: each keeps its number where possible, for its device's sake."""
    kept = {state.local_rank: state for state in states if state.local_rank < len(states)}
    rest = iter([state for state in states if kept.get(state.local_rank) is not state])
    return [kept[number] if number in kept else next(rest) for number in range(len(states))]
