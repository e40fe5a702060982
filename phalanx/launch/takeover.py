"""Take over the decisions about the ranks when the machine that decided is lost: collect what is left, then lead."""

from __future__ import annotations

import time
from typing import Any

from phalanx.launch.group import RankState
from phalanx.launch.leader import LeaderRole
from phalanx.launch.roles import LauncherContext, MemberRole

_HELLO_SECONDS = 3.0


class TakingOver:
    """Collects the ranks of the machines that are left, and then leads them."""

    def __init__(self, context: LauncherContext, before: MemberRole, lost: dict[str, str], others: list[str]) -> None:
        self._context, self._before = context, before
        self.lost = lost
        self._missing = set(others)
        self._reports = {context.node.own: before.ranks()}
        self._generation, self._failures = before.generation, before.failures
        assert context.spec.elastic is not None, "only then there is a role"
        self.deadline = time.monotonic() + max(_HELLO_SECONDS, context.spec.elastic.silence_seconds)

    def take_hello(self, mail: dict[str, Any]) -> None:
        """Take the report of a machine."""
        self._reports[mail["sender"]] = mail["hello"]
        self._generation = max(self._generation, mail["generation"])
        self._failures = max(self._failures, mail["failures"])
        self._missing.discard(mail["sender"])

    @property
    def is_complete(self) -> bool:
        """Whether all machines have reported, or were waited for long enough."""
        return not self._missing or time.monotonic() > self.deadline

    def lead(self, failures: int, address: tuple[str, int]) -> LeaderRole:
        """Return the role that decides from now on; the ranks of the lost machine are replaced, or left out.

        `failures`: before this attempt; those since then are known from the lost launcher.
        """
        members, ready = [], []
        self._reports[self._context.node.own] = self._before.ranks()  # as it is now
        own = {state.key: state for state in self._context.group.ranks.values()}
        for node, ranks in self._reports.items():
            for each in ranks:
                state = own.get(each["key"]) or RankState(
                    each["rank"], self._context.spec.label(each["slot"]), each["key"], each["slot"], node
                )
                state.node, state.code = node, each["code"]
                state.rank, state.local_rank = each["rank"], each["local_rank"]
                if each["is_member"]:
                    members.append(state)
                if each["ready"] is not None:
                    ready.append((state, each["ready"]))
        known = {state.rank for state in members}
        machine = next(iter(self.lost))
        gone = [
            RankState(rank, f"r{rank}", f"lost-{rank}", rank, machine)
            for rank in range(self._before.size)
            if rank not in known
        ]
        members = sorted([*members, *gone], key=lambda state: state.rank)
        self._context.node = self._context.node.without(set(self.lost) | self._missing)
        failures = max(failures, self._failures)
        role = LeaderRole(self._context, failures=failures, inherited=members, generation=max(1, self._generation))
        role.move_to(*address)
        role.take_lost_nodes({machine: self.lost[machine]})
        for state, message in ready:
            role.members.take(state, message)
        return role
