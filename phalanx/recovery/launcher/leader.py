"""The role of the launcher that decides about the ranks of all machines."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from phalanx.diagnosis import Evidence
from phalanx.launch.context import LauncherContext
from phalanx.launch.failure import FailureReport
from phalanx.launch.group import RankState
from phalanx.recovery.launcher.membership import Membership
from phalanx.recovery.launcher.policy import RECENT_SECONDS, fails_too_often
from phalanx.recovery.launcher.roles import LocalRanks


class LeaderRole(LocalRanks):
    """Decides for all machines."""

    def __init__(
        self,
        context: LauncherContext,
        evidence: Evidence,
        *,
        failures: int,
        inherited: list[RankState] | None = None,
        generation: int = 0,
    ) -> None:
        """`inherited`: the members of a group that another launcher has formed, those of lost machines included."""
        super().__init__(context, evidence)
        self._remote: dict[str, RankState] = {}
        self._machines = {node: (host, ranks) for node, host, ranks in context.node.machines}
        self._ended: set[str] = set()
        self._losses: defaultdict[str, list[float]] = defaultdict(list)
        self._address: dict[str, Any] = {}
        own = context.group.states
        members = inherited if inherited is not None else self._first_members(own)
        for state in members:
            if state.node != context.node.own:
                self._remote[state.key] = state
        self.members = Membership(
            self._elastic,
            members,
            self,
            failures=failures,
            max_restarts=context.spec.max_restarts,
            later=context.later,
            report=context.console.handle,
            give_up=lambda why: context.fail(FailureReport(cause=why, exit_code=1)),
            generation=generation,
        )

    def _first_members(self, own: list[RankState]) -> list[RankState]:
        """Return the ranks of all machines that begin, in their order."""
        if not self._context.node.machines:
            return own
        members: list[RankState] = []
        for node, (_, ranks) in self._machines.items():
            for local_rank in range(ranks):
                slot = len(members)
                if node == self._context.node.own:
                    members.append(own[local_rank])
                else:
                    label = self._context.spec.label(slot)
                    members.append(RankState(slot, label, f"r{slot}", slot, node, local_rank))
        return members

    @property
    def failures(self) -> int:
        """How many failures the run has had."""
        return self.members.failures

    # What `Membership` asks.

    def send(self, state: RankState, message: dict[str, Any]) -> None:
        """Send a message to a rank of any machine."""
        if state.node == self._context.node.own:
            self._send_here(state.key, message)
        elif state.node in self._machines:
            self._context.rendezvous.post(state.node, {"to": state.key, "message": message})

    def start(self, count: int, generation: int) -> dict[str, int]:
        """Start ranks where there is room: on machines that have lost some, else here."""
        if not self._machines:
            self._start_here(count, generation)
            return {self._context.node.own: count}
        started: dict[str, int] = {}
        known = (*self._context.group.ranks.values(), *self._remote.values())
        living = [state for state in known if state.code is None and not state.dismissed]
        for node, (_, ranks) in self._machines.items():
            free = min(count - sum(started.values()), ranks - sum(state.node == node for state in living))
            if free <= 0:
                continue
            started[node] = free
            self._ended.discard(node)
            if node == self._context.node.own:
                self._start_here(free, generation)
            else:
                self._context.rendezvous.post(node, {"start": free, "generation": generation})
        return started

    def retire(self, state: RankState) -> None:
        """Forget a process that has ended."""
        self._remote.pop(state.key, None)
        if state.node == self._context.node.own:
            self._context.group.retire(state)

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
        """Replace a rank that has ended with an error; return whether the run goes on.

        A machine, of several, that fails far more often than the others is left out instead.
        """
        now = time.monotonic()
        self._losses[ended.node].append(now)
        recent = {node: sum(now - at < RECENT_SECONDS for at in self._losses[node]) for node in self._machines}
        own = recent.pop(ended.node, 0)
        if ended.node == self._context.node.own or not fails_too_often(own, list(recent.values())):
            return self.members.take_loss(ended, how=how)
        host, _ = self._machines.pop(ended.node)
        self._context.rendezvous.post(
            ended.node, {"left_out": f"{own} ranks of {host} have failed, far more than elsewhere"}
        )
        lost = [state for state in self.members.group.members if state.node == ended.node]
        how = f"{how}; its machine {host} has failed {own} times and is left out"
        return self.members.take_loss(*lost, how=how, replaceable=False)

    def take_end(self, ended: RankState) -> None:
        """Take a rank that has finished."""
        self.members.take_end(ended)
        if self.members.group.spares_only:
            self.end()

    def take_mail(self, mail: dict[str, Any]) -> bool:
        """Take a message of another launcher."""
        node = mail["sender"]
        if "from" in mail:
            state = self._remote.get(mail["from"])
            if state is None:
                slot = mail["slot"]
                state = RankState(slot, self._context.spec.label(slot), mail["from"], slot, node, mail["local_rank"])
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
            self._context.rendezvous.post(
                node, {"left_out": "it reported too late after the machine that decided was lost"}
            )
        elif "arrival" in mail:
            self._take_arrival(mail["arrival"], mail["node"])
        return False

    def _take_remote_loss(self, mail: dict[str, Any]) -> None:
        state = self._remote.get(mail["lost"])
        if state is None:  # a new one, which has not reported yet
            state = RankState(-1, "", mail["lost"], -1, mail["sender"])
        state.code = mail["code"]
        if not self.take_loss(state, mail["how"]):
            self._context.fail(FailureReport.from_message(mail["failure"]))

    def take_lost_nodes(self, hosts: dict[str, str]) -> None:
        """Take machines that were lost, with all their ranks."""
        for node, host in hosts.items():
            self._machines.pop(node, None)
            self._ended.discard(node)
            self.members.lose_node(node)
            waiting = [state for state in self.members.group.spares if state.node == node]
            lost = [state for state in self.members.group.members if state.node == node]
            how = f"was lost with its machine {host}"
            if (lost or waiting) and not self.members.take_loss(*waiting, *lost, how=how, replaceable=False):
                cause = f"the machine {host} was lost with rank{'s' * (len(lost) > 1)} "
                cause += ", ".join(str(state.rank) for state in lost)
                self._context.fail(FailureReport(cause=cause, exit_code=1))
                return

    def _take_arrival(self, node: str, described: dict[str, Any]) -> None:
        """Take in a machine: its ranks get ready while the others train."""
        slots = [state.slot for state in (*self._context.group.ranks.values(), *self._remote.values())]
        first = max([*slots, *(state.slot for state in self.members.group.members)], default=-1) + 1
        self._machines[node] = (described["host"], described["ranks"])
        self.members.take_arrival(node, described["ranks"], f"the machine {described['host']}")
        own = self._context.node
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
        self._context.rendezvous.post(node, {"accept": info})

    def all_ended(self) -> bool:
        """Whether all machines have ended; called when this one has. Tell the others."""
        if any(node not in self._ended for node in self._machines if node != self._context.node.own):
            return False
        for node in self._machines:
            if node != self._context.node.own:
                self._context.rendezvous.post(node, {"all_ended": True})
        return True

    @property
    def unchanged_since(self) -> float:
        """When the ranks began to train in this group; infinity while it changes."""
        return self.members.group.unchanged_since

    @property
    def members_here(self) -> list[RankState]:
        """The ranks of this machine that train."""
        return [state for state in self.members.group.members if state.node == self._context.node.own and state.alive]

    def find_silent(self) -> list[RankState]:
        """Return ranks to be killed: stopped ones, and those that neither leave or join nor make progress."""
        late = self.members.find_late()
        for state in late:
            if state.node != self._context.node.own:
                self._context.rendezvous.post(state.node, {"late": state.key})
        here = [state for state in late if state.node == self._context.node.own]
        return [*super().find_silent(), *filter(self._is_stuck, here)]

    def end(self) -> None:
        """Let ranks that wait for a position end, also those that are only starting."""
        self.members.group.end()
        for state in self._context.group.alive:
            self._send_here(state.key, {"end": True})
