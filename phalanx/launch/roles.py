"""A launcher that decides about the ranks of all machines (`Leading`); `following` has the one that carries it out.

With one machine its launcher leads. Ranks have a control socket to their own launcher, launchers a mailbox
(`mailbox`).
"""

from __future__ import annotations

import selectors
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.host import messages
from phalanx.host.processes import is_stopped
from phalanx.launch.environment import NodeInfo
from phalanx.launch.failure import FailureReport
from phalanx.launch.group import RankGroup, RankState
from phalanx.launch.membership import Membership
from phalanx.launch.policy import RECENT_SECONDS, fails_too_often, patience
from phalanx.launch.spec import LaunchSpec

_CHECK_SECONDS = 0.5

Post = Callable[[str, dict[str, Any]], None]


@dataclass
class Hands:
    """What a role uses of the launcher."""

    spec: LaunchSpec
    group: RankGroup
    node: NodeInfo
    selector: selectors.BaseSelector
    later: Callable[[float, Callable[[], None]], None]
    report: Callable[[dict[str, Any]], None]
    post: Post
    fail: Callable[..., None]
    """Gets a `FailureReport`; with `final=True` this machine alone ends, and does not start again."""
    is_stuck: Callable[[RankState, float], bool]
    """Whether a rank of this machine has made no progress for so many seconds."""


class LocalRanks:
    """The ranks of this machine: their control sockets, and which of them are stopped."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self.failures = 0
        for state in hands.group.ranks.values():
            state.node = hands.node.own
            state.local_rank = state.slot - hands.node.first_rank

    def _listen_to_all(self) -> None:
        for state in self._hands.group.ranks.values():
            self._listen(state)

    def _listen(self, state: RankState) -> None:
        control = self._hands.group.controls[state.key]

        def take() -> None:
            received = messages.receive(control)
            if received is None:
                self._hands.selector.unregister(control)
            else:
                self._take_local(state, received[0])

        if control in self._hands.selector.get_map():
            self._hands.selector.unregister(control)
        self._hands.selector.register(control, selectors.EVENT_READ, take)

    def _take_local(self, state: RankState, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _start_here(self, count: int, generation: int) -> None:
        for _ in range(count):
            state = self._hands.group.add(generation)
            state.node = self._hands.node.own
            state.local_rank = state.slot - self._hands.node.first_rank
            self._listen(state)

    def _send_here(self, key: str, message: dict[str, Any]) -> None:
        control = self._hands.group.controls.get(key)
        if control is None:
            return
        try:
            messages.send(control, message)
        except (BrokenPipeError, ConnectionResetError):
            return  # it has ended: the fork server reports that

    def find_silent(self) -> list[RankState]:
        """Return the ranks of this machine that are stopped for too long, which are killed and replaced."""
        assert self._hands.spec.elastic is not None, "only then there is a role"
        now, limit, found = time.monotonic(), self._hands.spec.elastic.silence_seconds, []
        for state in self._hands.group.alive:
            if state.pid is None or not is_stopped(state.pid):
                state.stopped_since = None
            elif state.stopped_since is None:
                state.stopped_since = now
            elif now - state.stopped_since >= limit:
                found.append(state)
        return found

    def _is_stuck(self, state: RankState) -> bool:
        """Whether a rank of this machine, which does not leave or join, makes no progress either."""
        assert self._hands.spec.elastic is not None, "only then there is a role"
        return self._hands.is_stuck(state, patience(self._hands.spec.elastic.silence_seconds))

    @property
    def next_deadline(self) -> float:
        """When `find_silent` may next have something to say."""
        return time.monotonic() + _CHECK_SECONDS


class Leading(LocalRanks):
    """Decides for all machines."""

    def __init__(
        self, hands: Hands, *, failures: int, inherited: list[RankState] | None = None, generation: int = 0
    ) -> None:
        """`inherited`: the members of a group that another launcher has formed, those of lost machines included."""
        super().__init__(hands)
        elastic = hands.spec.elastic
        assert elastic is not None, "only then there is a role"
        self._remote: dict[str, RankState] = {}
        self._machines = {node: (host, ranks) for node, host, ranks in hands.node.machines}
        self._ended: set[str] = set()
        self._losses: defaultdict[str, list[float]] = defaultdict(list)
        self._address: dict[str, Any] = {}
        own = list(hands.group.ranks.values())
        members = inherited if inherited is not None else self._first_members(own)
        for state in members:
            if state.node != hands.node.own:
                self._remote[state.key] = state
        self.members = Membership(
            elastic,
            members,
            self,
            failures=failures,
            max_restarts=hands.spec.max_restarts,
            later=hands.later,
            report=hands.report,
            give_up=lambda why: hands.fail(FailureReport(cause=why, exit_code=1)),
            generation=generation,
        )
        self._listen_to_all()

    def _first_members(self, own: list[RankState]) -> list[RankState]:
        """Return the ranks of all machines that begin, in their order."""
        if not self._hands.node.machines:
            return own
        members: list[RankState] = []
        for node, (_, ranks) in self._machines.items():
            for local_rank in range(ranks):
                slot = len(members)
                if node == self._hands.node.own:
                    members.append(own[local_rank])
                else:
                    label = self._hands.spec.label(slot)
                    members.append(RankState(slot, label, f"r{slot}", slot, node, local_rank))
        return members

    @property
    def failures(self) -> int:
        """How many failures the run has had."""
        return self.members.failures

    @failures.setter
    def failures(self, count: int) -> None:
        """Do nothing: the membership counts."""

    # What `Membership` asks.

    def send(self, state: RankState, message: dict[str, Any]) -> None:
        """Send a message to a rank of any machine."""
        if state.node == self._hands.node.own:
            self._send_here(state.key, message)
        elif state.node in self._machines:
            self._hands.post(state.node, {"to": state.key, "message": message})

    def start(self, count: int, generation: int) -> dict[str, int]:
        """Start ranks where there is room: on machines that have lost some, else here."""
        if not self._machines:
            self._start_here(count, generation)
            return {self._hands.node.own: count}
        started: dict[str, int] = {}
        known = (*self._hands.group.ranks.values(), *self._remote.values())
        living = [state for state in known if state.code is None and not state.dismissed]
        for node, (_, ranks) in self._machines.items():
            free = min(count - sum(started.values()), ranks - sum(state.node == node for state in living))
            if free <= 0:
                continue
            started[node] = free
            self._ended.discard(node)
            if node == self._hands.node.own:
                self._start_here(free, generation)
            else:
                self._hands.post(node, {"start": free, "generation": generation})
        return started

    def retire(self, state: RankState) -> None:
        """Forget a process that has ended."""
        self._remote.pop(state.key, None)
        if state.node == self._hands.node.own:
            self._hands.group.retire(state)

    def address(self) -> dict[str, Any]:
        """Return where the ranks' store is, if it has moved."""
        return self._address

    def move_to(self, address: str, port: int) -> None:
        """Use another store for the ranks from the next generation on."""
        self._address = {"master_addr": address, "master_port": port}

    # What the attempt and other launchers tell.

    def _take_local(self, state: RankState, message: dict[str, Any]) -> None:
        self.members.take(state, message)

    def take_loss(self, ended: RankState, how: str) -> bool:
        """Take a rank of this machine that has ended with an error; return whether the run goes on."""
        return self._take_losses(ended, how)

    def _take_losses(self, ended: RankState, how: str) -> bool:
        """Replace the rank; a machine, of several, that fails far more often than the others is left out instead."""
        now = time.monotonic()
        self._losses[ended.node].append(now)
        recent = {node: sum(now - at < RECENT_SECONDS for at in self._losses[node]) for node in self._machines}
        own = recent.pop(ended.node, 0)
        if ended.node == self._hands.node.own or not fails_too_often(own, list(recent.values())):
            return self.members.take_loss(ended, how=how)
        host, _ = self._machines.pop(ended.node)
        self._hands.post(ended.node, {"left_out": f"{own} ranks of {host} have failed, far more than elsewhere"})
        lost = [state for state in self.members.members if state.node == ended.node]
        how = f"{how}; its machine {host} has failed {own} times and is left out"
        return self.members.take_loss(*lost, how=how, replaceable=False)

    def take_end(self, ended: RankState) -> None:
        """Take a rank that has finished."""
        if self.members.spares_only:
            self.end()
        else:
            self.members.take_end(ended)

    def take_mail(self, mail: dict[str, Any]) -> bool:
        """Take a message of another launcher."""
        node = mail["sender"]
        if "from" in mail:
            state = self._remote.get(mail["from"])
            if state is None:
                slot = mail["slot"]
                state = RankState(slot, self._hands.spec.label(slot), mail["from"], slot, node, mail["local_rank"])
                self._remote[state.key] = state
            self.members.take(state, mail["message"])
        elif "lost" in mail:
            self._take_remote_loss(mail)
        elif "finished" in mail:
            if (state := self._remote.get(mail["finished"])) is not None:
                state.code = 0
                self.take_end(state)
        elif "ended" in mail:
            self._ended.add(node)
        elif "hello" in mail:  # after this launcher has begun to lead without that machine
            self._hands.post(node, {"left_out": "it reported too late after the machine that decided was lost"})
        elif "arrival" in mail:
            self._take_arrival(mail["arrival"], mail["node"])
        return False

    def _take_remote_loss(self, mail: dict[str, Any]) -> None:
        state = self._remote.get(mail["lost"])
        if state is None:  # a new one, which has not reported yet
            state = RankState(-1, "", mail["lost"], -1, mail["sender"])
        state.code = mail["code"]
        if not self._take_losses(state, mail["how"]):
            self._hands.fail(FailureReport.from_message(mail["failure"]))

    def take_lost_nodes(self, hosts: dict[str, str]) -> None:
        """Take machines that were lost, with all their ranks."""
        for node, host in hosts.items():
            self._machines.pop(node, None)
            self._ended.discard(node)
            self.members.lose_node(node)
            waiting = [state for state in self.members.spares if state.node == node]
            lost = [state for state in self.members.members if state.node == node]
            how = f"was lost with its machine {host}"
            if (lost or waiting) and not self.members.take_loss(*waiting, *lost, how=how, replaceable=False):
                cause = f"the machine {host} was lost with rank{'s' * (len(lost) > 1)} "
                cause += ", ".join(str(state.rank) for state in lost)
                self._hands.fail(FailureReport(cause=cause, exit_code=1))
                return

    def _take_arrival(self, node: str, described: dict[str, Any]) -> None:
        """Take in a machine: its ranks get ready while the others train."""
        slots = [state.slot for state in (*self._hands.group.ranks.values(), *self._remote.values())]
        first = max([*slots, *(state.slot for state in self.members.members)], default=-1) + 1
        self._machines[node] = (described["host"], described["ranks"])
        self.members.take_arrival(node, described["ranks"], f"the machine {described['host']}")
        own = self._hands.node
        info = {
            "node_rank": len(self._machines) - 1,
            "num_nodes": len(self._machines),
            "first_rank": first,
            "world_size": own.world_size,
            "master_addr": self._address.get("master_addr", own.master_addr),
            "master_port": self._address.get("master_port", own.master_port),
            "machines": [[each, *facts] for each, facts in self._machines.items()],
            "late": True,
        }
        self._hands.post(node, {"accept": info})

    def all_ended(self) -> bool:
        """Whether all machines have ended; called when this one has. Tell the others."""
        if any(node not in self._ended for node in self._machines if node != self._hands.node.own):
            return False
        for node in self._machines:
            if node != self._hands.node.own:
                self._hands.post(node, {"all_ended": True})
        return True

    @property
    def unchanged_since(self) -> float:
        """When the ranks began to train in this group; infinity while it changes."""
        return self.members.unchanged_since

    @property
    def members_here(self) -> list[RankState]:
        """The ranks of this machine that train."""
        return [state for state in self.members.members if state.node == self._hands.node.own and state.alive]

    def find_silent(self) -> list[RankState]:
        """Return ranks to be killed: stopped ones, and those that neither leave or join nor make progress."""
        late = self.members.find_late()
        for state in late:
            if state.node != self._hands.node.own:
                self._hands.post(state.node, {"late": state.key})
        here = [state for state in late if state.node == self._hands.node.own]
        return [*super().find_silent(), *filter(self._is_stuck, here)]

    def end(self) -> None:
        """Let ranks that wait for a position end, also those that are only starting."""
        self.members.end()
        for state in self._hands.group.alive:
            self._send_here(state.key, {"end": True})
