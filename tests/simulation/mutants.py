"""Defects that were mended, each as a patch that brings it back: the simulator has to find them by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from phalanx.launch import membership
from phalanx.launch.membership import Ask, Membership
from phalanx.recovery.launcher import node as launcher_node
from phalanx.recovery.launcher.group import ElasticGroup
from phalanx.recovery.launcher.node import Node
from phalanx.recovery.messages import LeftOut, LostRank, ViewChange
from tests.simulation import launcher as launchers

Patch = pytest.MonkeyPatch


def takeover_keeps_lost_nodes(patch: Patch) -> None:
    """Followers are not told which nodes were lost."""
    apply = Node._on_view_change

    def without_losses(self: Node, sender: str, message: ViewChange) -> None:
        nodes = {name: node for name, node in message.nodes.items() if node is not None}
        apply(self, sender, ViewChange(message.version, message.term, message.generation, message.failures, nodes))

    patch.setattr(Node, "_on_view_change", without_losses)


def takeover_forgets_late_nodes(patch: Patch) -> None:
    """Followers are not told which nodes came late."""
    apply = Node._on_view_change

    def without_arrivals(self: Node, sender: str, message: ViewChange) -> None:
        known = self.view.nodes
        whole = message.whole
        nodes = {name: node for name, node in message.nodes.items() if whole or node is None or name in known}
        changed = ViewChange(message.version, message.term, message.generation, message.failures, nodes, whole)
        apply(self, sender, changed)

    patch.setattr(Node, "_on_view_change", without_arrivals)


def cut_off_node_leads_after_the_end(patch: Patch) -> None:
    """A node that is cut off takes over when the others have ended, though the run has."""
    paused_node_is_not_told_that_it_was_lost(patch)
    patch.setattr(Membership, "_left_out", lambda self, node: Ask(()))
    patch.setattr(Membership, "_surely_ended", property(lambda self: self.ended))
    patch.setattr(Membership, "_is_stale", property(lambda self: False, lambda self, stale: None), raising=False)
    patch.setattr(Membership, "_uncertain", property(lambda self: set(), lambda self, nodes: None), raising=False)


def first_node_begins_a_second_run(patch: Patch) -> None:
    """No node says at the endpoint that the run goes on elsewhere."""
    patch.setattr(Membership, "leaves_signpost", property(lambda self: False))


def usage_error_of_another_node_is_tried_again(patch: Patch) -> None:
    """The report about a lost rank stays on its node: the leader knows that it was lost, and not how."""
    report = Node._report

    def without_report(self: Node, message: Any) -> None:
        if isinstance(message, LostRank):
            failure = {**message.failure, "exit_code": 1}
            message = LostRank(message.key, message.code, message.how, failure)
        report(self, message)

    patch.setattr(Node, "_report", without_report)


def leader_shrinks_node_by_node(patch: Patch) -> None:
    """A cut-off leader that notices the loss of one node after the other goes on, and so do the others."""
    patch.setattr(Membership, "_before", property(lambda self: list(self.nodes)))
    patch.setattr(ElasticGroup, "_agree_on", property(lambda self: 0, lambda self, version: None), raising=False)


def half_of_the_nodes_is_enough(patch: Patch) -> None:
    """Of two halves that do not see each other both go on, and not only the one with the leader."""

    def half(members: Iterable[str], alive: Collection[str], ended: Collection[str], leader: str) -> bool:
        rest = [name for name in members if name not in ended]
        return 2 * sum(name in alive for name in rest) >= len(rest)

    for module in (membership, launcher_node):
        patch.setattr(module, "may_continue", half)


def newcomers_count_at_once(patch: Patch) -> None:
    """A cut-off leader takes in new nodes, and has half of all with them."""
    patch.setattr(Membership, "new", property(lambda self: {}, lambda self, new: None), raising=False)


def paused_node_is_not_told_that_it_was_lost(patch: Patch) -> None:
    """A node that stood still goes on following, gets no order, and leads when the others have ended."""
    send = ElasticGroup._send

    def without_word(self: ElasticGroup, node: str, message: Any) -> None:
        if not isinstance(message, LeftOut):
            send(self, node, message)

    patch.setattr(ElasticGroup, "_send", without_word)


def late_rank_joins_a_finished_group(patch: Patch) -> None:
    """A rank that gets ready when the others have finished is waited for."""
    patch.setattr(ElasticGroup, "spares_only", property(lambda self: False))


def machines_are_asked_one_after_the_other(patch: Patch) -> None:
    """The leader stands still for a second for each node that does not answer."""
    ask = launchers.Launcher._ask

    def in_turn(self: launchers.Launcher, names: tuple[str, ...]) -> None:
        ask(self, names)
        others = [self.cluster.neighbour(self, name) for name in names]
        silent = [other for other in others if other is not None and self.cluster.is_dark(other.machine)]
        if silent and self.paused_since is None:
            self.pause()
            self.clock.later(1.0 * len(silent), self.go_on)

    patch.setattr(launchers.Launcher, "_ask", in_turn)


def first_ranks_go_on_whatever_they_hold(patch: Patch) -> None:
    """With fewer ranks than are there a group has the first of them, and not those that hold the last step."""
    patch.setattr(ElasticGroup, "_choose", lambda group, able: able[: group.size])


def node_that_stood_still_leads(patch: Patch) -> None:
    """A node takes over with reports that came while it was suspended."""
    check = Membership.check

    def check_at_once(members: Membership, now: float) -> list[Any]:
        members._checked = now
        return check(members, now)

    patch.setattr(Membership, "check", check_at_once)
