"""The ranks of one attempt that change in place: lost ones are replaced while the others keep their processes.

    running --a rank is lost, or one is added--> leaving --all are ready--> forming --all have joined--> running

*leaving*: ranks abort the collective that they wait in, or stop at a step's boundary, and report their last step.
*forming*: each rank got its new position and joins the group of the next generation. A loss in either state begins
*leaving* again. Each rank has a control socket (`phalanx.world.membership` is the other end).
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.host import messages
from phalanx.host.processes import is_stopped
from phalanx.launch.group import RankGroup, RankState
from phalanx.launch.policy import Decision, Facts, decide, pause
from phalanx.launch.spec import Elastic
from phalanx.observe.events import Message, RankLost

_CHECK_SECONDS = 0.5
_PATIENCE = 6.0
"""So many times longer than a stopped process is waited for one that may be in a long step."""


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
        group: RankGroup,
        *,
        failures: int,
        max_restarts: int,
        selector: selectors.BaseSelector,
        later: Callable[[float, Callable[[], None]], None],
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._elastic, self._group = elastic, group
        self._max_restarts = max_restarts
        self.failures = failures
        self._selector, self._later, self._report = selector, later, report
        self._members = list(group.ranks.values())
        self._spares: list[RankState] = []
        self._state: Literal["starting", "running", "leaving", "forming"] = "starting"
        self._steps: dict[str, int] = {}
        """The last step of each process that is ready for the next generation."""
        self._joined: set[str] = set()
        self._holders: set[str] = set()
        """Processes that have been in a group, and so hold the state of the run."""
        self._size = len(self._members)
        self._generation = 0
        self._change: _Change | None = None
        self._since = time.monotonic()
        self._last_step = -1
        self._stuck = 0
        for state in self._members:
            self._listen(state)

    # --- what arrives -------------------------------------------------------------------------------------------

    def _listen(self, state: RankState) -> None:
        control = self._group.controls[state.key]
        self._selector.register(control, selectors.EVENT_READ, lambda: self._take(state, control))

    def _take(self, state: RankState, control: Any) -> None:
        received = messages.receive(control)
        if received is None:
            self._selector.unregister(control)
            return
        message, _ = received
        if "joined" in message and message["joined"] == self._generation:
            self._joined.add(state.key)
            self._holders.add(state.key)
            if all(member.key in self._joined for member in self._members):
                self._enter("running")
                self._keep_spares()
        elif "ready" in message:
            self._steps[state.key] = message["step"]
            if state not in self._members and state not in self._spares:
                self._spares.append(state)
            if self._state == "running" and state in self._members:  # it noticed before the launcher
                self._leave(message["ready"])
            self._form_if_all_ready()

    def take_loss(self, ended: RankState, how: str) -> bool:
        """Take a rank that has ended with an error; return whether the run goes on without a restart."""
        self._steps.pop(ended.key, None)
        if ended in self._spares:
            self._group.retire(ended)
            self._spares.remove(ended)
            self._later(pause(self._stuck), self._fill)
            return True
        if self._state == "starting":
            return False
        self.failures += 1
        others = [state for state in (*self._members, *self._spares) if state is not ended and state.code is None]
        facts = Facts(
            lost=[ended.code or 0],
            present=sum(state.key in self._holders for state in others),
            size=self._size,
            sizes=self._elastic.sizes,
            ended=sum(member.code is not None and member is not ended for member in self._members),
            failures=self.failures,
            max_restarts=self._max_restarts,
            without_progress=self._stuck,
        )
        decision = decide(facts)
        if decision.kind == "give_up":
            self._say(f"rank {ended.rank} {how}; no recovery in place: {decision.why}")
            return False
        self._group.retire(ended)
        self._execute(decision, ended, how)
        return True

    def _execute(self, decision: Decision, ended: RankState, how: str) -> None:
        self._members.remove(ended)
        self._size = decision.size
        self._leave(f"rank {ended.rank} {how}", lost=ended.rank)
        self._report(RankLost(ended.rank, how, decision.kind, decision.size, decision.why).to_dict())
        self._later(decision.pause, self._fill)

    def _say(self, text: str) -> None:
        self._report(Message("warning", text).to_dict())

    def _fill(self) -> None:
        """Start what is missing; spare ranks, which have loaded everything already, come first."""
        missing = self._size - len(self._members) - len(self._spares)
        for _ in range(missing):
            self._start_one()
        self._form_if_all_ready()

    def _start_one(self) -> None:
        state = self._group.add(self._generation + 1)
        self._listen(state)
        self._spares.append(state)

    def _keep_spares(self) -> None:
        for _ in range(self._elastic.spares - len(self._spares)):
            self._start_one()

    # --- transitions --------------------------------------------------------------------------------------------

    def _enter(self, state: Literal["running", "leaving", "forming"]) -> None:
        self._state, self._since = state, time.monotonic()

    def _leave(self, why: str, lost: int | None = None) -> None:
        """Let all ranks leave what they wait in."""
        self._change = self._change or _Change(time.time())
        self._change.reasons.append(why)
        if lost is not None:
            self._change.lost.append(lost)
        if self._state != "leaving":
            self._enter("leaving")
            self._steps = {key: step for key, step in self._steps.items() if key not in self._member_keys()}
        for member in self._members:
            if member.key not in self._steps:
                self._send(member, {"abort": why})

    @property
    def is_settled(self) -> bool:
        """Whether the ranks train, and none is being added."""
        return self._state == "running" and self._change is None

    def resize(self, size: int, why: str) -> str | None:
        """Change the number of ranks at a step's boundary; return why that is not possible, if so."""
        if size not in self._elastic.sizes:
            allowed = ", ".join(str(each) for each in sorted(self._elastic.sizes))
            return f"{size} ranks are not possible here. Possible: {allowed}."
        self._size = size
        self._change = _Change(time.time(), [why])
        if size > len(self._members) + len(self._spares):
            self._fill()  # new ranks get ready while the others train
        else:
            self._ask_to_leave()
        return None

    def _ask_to_leave(self) -> None:
        assert self._change is not None
        self._enter("leaving")
        self._steps = {key: step for key, step in self._steps.items() if key not in self._member_keys()}
        for member in self._members:
            self._send(member, {"regroup": self._change.reasons[-1]})

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
        step = max(self._steps[member.key] for member in self._members) if self._members else -1
        self._stuck = self._stuck + 1 if step <= self._last_step else 0
        self._last_step = max(step, self._last_step)
        chosen = (self._members + able)[: self._size]
        # A rank keeps its number where that is possible: its logs and its device stay the same.
        numbers = {state.rank: state for state in self._members if state in chosen and state.rank < self._size}
        free = iter(number for number in range(self._size) if number not in numbers)
        for state in chosen:
            if numbers.get(state.rank) is not state:
                state.rank = next(free)
        self._spares = [state for state in self._spares + self._members if state not in chosen]
        self._members = sorted(chosen, key=lambda state: state.rank)
        self._form()

    def _form(self) -> None:
        self._generation += 1
        self._joined.clear()
        self._enter("forming")
        change = self._change or _Change(time.time())
        for state in self._members:
            self._steps.pop(state.key, None)
            position = {
                "rank": state.rank,
                "local_rank": state.rank,
                "world_size": self._size,
                "local_world_size": self._size,
                "generation": self._generation,
                "began": change.began,
                "reason": "; ".join(change.reasons),
                "lost": change.lost,
            }
            self._send(state, {"form": position})
        self._change = None

    def _member_keys(self) -> set[str]:
        return {member.key for member in self._members}

    def _send(self, state: RankState, message: dict[str, Any]) -> None:
        try:
            messages.send(self._group.controls[state.key], message)
        except (BrokenPipeError, ConnectionResetError):
            return  # it has ended: the fork server reports that

    # --- silence ------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float:
        """When `find_silent` may next have something to say."""
        return time.monotonic() + _CHECK_SECONDS

    def find_silent(self) -> list[RankState]:
        """Return ranks to be killed: stopped ones, and those that do not leave or join for too long."""
        if self._state == "starting":
            return []
        limit = self._elastic.silence_seconds
        now = time.monotonic()
        silent = []
        for state in self._members:
            stopped = state.alive and state.pid is not None and is_stopped(state.pid)
            if not stopped:
                state.stopped_since = None
            elif state.stopped_since is None:
                state.stopped_since = now
            if stopped and now - (state.stopped_since or now) >= limit:
                silent.append(state)
        if self._state in ("leaving", "forming") and now - self._since > _PATIENCE * limit:
            done = self._steps.keys() if self._state == "leaving" else self._joined
            silent += [member for member in self._members if member.key not in done and member not in silent]
        return silent

    def end(self) -> None:
        """Let ranks that wait for the next generation end: there will be none."""
        for state in (*self._spares, *self._members):
            self._send(state, {"end": True})

    @property
    def spares_only(self) -> bool:
        """Whether all members have ended, and only spare ranks are left."""
        return all(member.code is not None for member in self._members)
