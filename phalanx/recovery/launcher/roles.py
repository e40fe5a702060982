"""Roles of a launcher: `MemberRole` carries out what the launcher of another machine decides; `leader` decides.

With one machine its launcher leads. Ranks have a control socket to their own launcher, launchers a mailbox
(`mailbox`).
"""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from typing import Any

from phalanx.diagnosis import Evidence
from phalanx.host import messages
from phalanx.host.processes import is_stopped
from phalanx.launch.context import LauncherContext
from phalanx.launch.failure import FailureReport
from phalanx.launch.group import RankState
from phalanx.recovery.launcher.policy import patience

_CHECK_SECONDS = 0.5


class LocalRanks:
    """The ranks of this machine: their control sockets, and which of them are stopped."""

    def __init__(self, context: LauncherContext, evidence: Evidence) -> None:
        assert context.spec.elastic is not None, "only then there is a role"
        self._context, self._elastic, self._evidence = context, context.spec.elastic, evidence
        self._waits_for = ("", "")

    def listen(self) -> None:
        """Take messages of the ranks of this machine, which have been started."""
        for state in self._context.group.states:
            self._listen(state)

    def _listen(self, state: RankState) -> None:
        control = self._context.group.controls[state.key]

        def take() -> None:
            received = messages.receive(control)
            if received is None:
                self._context.selector.unregister(control)
            else:
                self._take_local(state, received[0])

        if control in self._context.selector.get_map():
            self._context.selector.unregister(control)
        self._context.selector.register(control, selectors.EVENT_READ, take)

    def _take_local(self, state: RankState, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _start_here(self, count: int, generation: int) -> None:
        for _ in range(count):
            self._listen(self._context.group.add(generation))

    def _send_here(self, key: str, message: dict[str, Any]) -> None:
        control = self._context.group.controls.get(key)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: the fork server reports that
            if control is not None:
                messages.send(control, message)

    def find_silent(self) -> list[RankState]:
        """Return the ranks of this machine that are stopped for too long, which are killed and replaced."""
        now, limit, found = time.monotonic(), self._elastic.silence_seconds, []
        for state in self._context.group.alive:
            if state.pid is None or not is_stopped(state.pid):
                state.stopped_since = None
            elif state.stopped_since is None:
                state.stopped_since = now
            elif now - state.stopped_since >= limit:
                found.append(state)
        return found

    def _is_stuck(self, state: RankState) -> bool:
        """Whether a rank of this machine, which does not leave or join, makes no progress either."""
        if self._evidence.is_stuck(state, patience(self._elastic.silence_seconds)):
            return True
        place = self._evidence.place(state)
        if place and (state.key, place) != self._waits_for:
            self._waits_for = (state.key, place)
            self._context.console.notice(f"rank {state.rank} is in {place}: the others wait for it")
        return False

    @property
    def next_deadline(self) -> float:
        """When `find_silent` may next have something to say."""
        return time.monotonic() + _CHECK_SECONDS


class MemberRole(LocalRanks):
    """Carries out what the launcher of another machine decides."""

    def __init__(self, context: LauncherContext, evidence: Evidence, leader: str) -> None:
        super().__init__(context, evidence)
        self.leader = leader
        self._ready: dict[str, dict[str, Any]] = {}
        self.generation = self.failures = 0
        """The generation of the group that this machine's ranks were in last, and the failures until then."""
        self._told_end = False
        self._late: set[str] = set()
        self._formed_at = time.monotonic()
        self.size = context.node.world_size
        self._formed = set() if context.node.late else set(context.group.ranks)

    def _take_local(self, state: RankState, message: dict[str, Any]) -> None:
        self._late.discard(state.key)  # it has left or joined
        if "ready" in message:
            self._ready[state.key] = message
        about = {"from": state.key, "slot": state.slot, "local_rank": state.local_rank}
        self._context.rendezvous.post(self.leader, {**about, "message": message})

    def take_loss(self, ended: RankState, how: str) -> bool:
        """Report a rank of this machine that has ended with an error."""
        self._ready.pop(ended.key, None)
        self._context.group.retire(ended)
        cause = FailureReport(cause=how, exit_code=1, rank=ended.rank, label=ended.label)
        facts = {"lost": ended.key, "how": how, "code": ended.code, "failure": cause.to_message()}
        self._context.rendezvous.post(self.leader, facts)
        return True

    def take_end(self, ended: RankState) -> None:
        """Report a rank that has finished."""
        self._context.rendezvous.post(self.leader, {"finished": ended.key})

    def take_mail(self, mail: dict[str, Any]) -> bool:
        """Carry out an order."""
        if "to" in mail:
            message = mail["message"]
            state = self._context.group.ranks.get(mail["to"])
            if "form" in message and state is not None:
                self._ready.pop(state.key, None)
                self._formed.add(state.key)
                self._formed_at = time.monotonic()
                form = message["form"]
                state.rank, state.local_rank = form["rank"], form["local_rank"]
                self.generation, self.size = form["generation"], form["world_size"]
                self.failures = form["failures"]
            elif "end" in message or "wait" in message:
                self._formed.discard(mail["to"])
            self._send_here(mail["to"], message)
        elif "start" in mail:
            self._told_end = False
            self._start_here(mail["start"], mail["generation"])
        elif "left_out" in mail:
            cause = f"this machine is left out of the run: {mail['left_out']}"
            self._context.fail(FailureReport(cause=cause, exit_code=1), final=True)  # the others go on
        elif "late" in mail:
            self._late.add(mail["late"])
        return "all_ended" in mail

    def find_silent(self) -> list[RankState]:
        """Return ranks to be killed: stopped ones, and late ones, as the deciding launcher says, without progress."""
        late = [state for state in self._context.group.alive if state.key in self._late]
        return [*super().find_silent(), *filter(self._is_stuck, late)]

    def follow(self, leader: str) -> None:
        """Report the ranks of this machine to the launcher that decides from now on."""
        self.leader = leader
        self._told_end = False  # the report of the end may have been lost with the machine before
        self._context.rendezvous.post(
            leader, {"hello": self.ranks(), "generation": self.generation, "failures": self.failures}
        )

    def ranks(self) -> list[dict[str, Any]]:
        """Return the ranks of this machine: their positions, and what those have reported that wait for one."""
        return [
            {
                "key": state.key,
                "slot": state.slot,
                "rank": state.rank,
                "local_rank": state.local_rank,
                "code": state.code,
                "is_member": state.key in self._formed,
                "ready": self._ready.get(state.key),
            }
            for state in self._context.group.states
        ]

    def all_ended(self) -> bool:
        """Report, once, that this machine has ended; False: the launcher that decides says when all have."""
        if not self._told_end:
            self._told_end = True
            self._context.rendezvous.post(self.leader, {"ended": True})
        return False

    @property
    def unchanged_since(self) -> float:
        """When the ranks began to train in this group; infinity while some wait for a position."""
        return math.inf if self._formed & self._ready.keys() else self._formed_at

    @property
    def members_here(self) -> list[RankState]:
        """The ranks of this machine that train."""
        return [state for state in self._context.group.alive if state.key in self._formed]

    def end(self) -> None:
        """Let ranks of this machine that wait for a position end."""
        for key in self._ready:
            self._send_here(key, {"end": True})
