"""The launchers of thousands of nodes: what one start, loss, takeover or arrival costs the node that leads.

    python -m tests.simulation.scale --nodes 1024 4096 16384

The state machines are those of every launcher; lists that all nodes have in common are kept once. Virtual seconds say
when a decision was made and when all ranks trained again, with links of 50 us to 1 ms and the start of processes as
given; CPU seconds are those of this machine in the state machines of the leader.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.launch import membership
from phalanx.launch.environment import NodeInfo
from phalanx.recovery.launcher import protocol, view
from phalanx.recovery.launcher.view import GroupView
from tests.simulation.cluster import Cluster
from tests.simulation.launcher import Launcher
from tests.simulation.plan import Plan

_RANKS = 8
_SILENCE = 10.0
_LINK_SECONDS = 0.3
"""How often neighbours ask each other."""
_RACK = 64


class _Shared:
    """Remembers what a function has made of the same objects: what all nodes compute is computed once."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._made: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def __call__(self, *arguments: Any) -> Any:
        key = tuple(map(id, arguments))
        if key not in self._made:
            if len(self._made) > 64:
                self._made.clear()
            self._made[key] = (self._call(*arguments), arguments)  # which keeps the identities
        return self._made[key][0]


def share_lists() -> None:
    """Let the nodes of this process share lists that are the same."""
    membership.changed = view.changed = _Shared(membership.changed)  # type: ignore[assignment]
    membership.in_order = _Shared(membership.in_order)  # type: ignore[assignment]


class ManyNodes(Cluster):
    """A cluster whose nodes share what is the same, and whose leader is measured."""

    def __init__(self, plan: Plan) -> None:
        self._views: dict[int, Mapping[str, Any]] = {}
        self._machines_of: tuple[Any, list[Any]] = (None, [])
        self._entries: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._leading: Launcher | None = None
        self.cpu = 0.0
        self.only: tuple[str, ...] = ()
        """The events to measure; none: all."""
        self.rows: list[dict[str, Any]] = []
        super().__init__(plan)
        self.measures = True

    def machines_of(self, nodes: Mapping[str, Any]) -> list[list[Any]]:
        """Return nodes as a `NodeInfo` has them, the same list for all."""
        if self._machines_of[0] is not nodes:
            self._machines_of = (nodes, super().machines_of(nodes))
        return self._machines_of[1]

    def first_view(self, place: NodeInfo, failures: int) -> GroupView:
        """Return a view whose list of nodes is the same for all."""
        key = id(place.nodes) + place.late
        if key not in self._views:
            self._views[key] = super().first_view(place, failures).nodes
        return GroupView(place.leader, self._views[key], term=place.term, failures=failures)

    def entries_from(self, nodes: Mapping[str, Any]) -> dict[str, Any]:
        """Return nodes as entries, the same for all."""
        key = id(nodes)
        if key not in self._entries:
            if len(self._entries) > 64:
                self._entries.clear()
            self._entries[key] = (nodes, super().entries_from(nodes))
        return self._entries[key][1]

    def timed(self, launcher: Launcher, event: Any, call: Callable[[], list[protocol.Action]]) -> list[protocol.Action]:
        """Measure the leader."""
        if not launcher.leads:
            return call()
        began = time.process_time()
        actions = call()
        self.cpu += time.process_time() - began
        return actions

    def size(self, mails: Any) -> int:
        """Return the bytes of mail; a long batch is estimated from its first messages."""
        if isinstance(mails, list) and len(mails) > 4:
            return super().size(mails[:4]) * len(mails) // 4
        return super().size(mails)

    def on_death(self, launcher: Launcher) -> None:
        """Let neighbours, and those that read in its store, notice that a launcher has ended."""
        if launcher.members is None or self.is_dark(launcher.machine):
            return
        names = membership.in_order(launcher.members.nodes)
        place = names.index(launcher.own) if launcher.own in names else 0
        watching = [*names[max(0, place - 3) : place], *(names[place - 3 :] if place < 3 else [])]
        readers = names if launcher.leads else []
        for name in dict.fromkeys([*watching, *readers]):
            other = self.neighbour(launcher, name)
            if other is not None and other is not launcher:
                seconds = self.network.one_way() + (self.rng.uniform(0.0, _LINK_SECONDS) if name in watching else 0.0)
                self.clock.later(seconds, other.guard(other.look_around))

    # --- measuring ------------------------------------------------------------------------------------------------

    @property
    def leader(self) -> Launcher:
        """The launcher that leads."""
        self.is_training()
        assert self._leading is not None
        return self._leading

    def is_training(self) -> bool:
        """Whether all ranks train in one group."""
        if not (self._leading is not None and self._leading.alive and self._leading.leads):
            self._leading = next(
                (one for one in self.processes if one.alive and one.leads and one.node is not None), None
            )
        node = None if self._leading is None else self._leading.node
        return node is not None and node.group is not None and node.group.is_settled

    def measure(self, what: str, cause: Callable[[], None], decided: Callable[[], bool], limit: float = 300.0) -> None:
        """Let something happen; note when it is decided and when all train again, and what it costs."""
        if self.only and what not in self.only:
            return
        self.sent.clear(), self.received.clear(), self.bytes.clear()
        self.cpu, began = 0.0, self.clock.now
        real = time.process_time()
        cause()
        at: list[float] = []
        seen = [-1]

        def look() -> bool:
            if not at and len(self.decisions) + self.clock.handled % 64 != seen[0]:
                seen[0] = len(self.decisions) + self.clock.handled % 64
                if decided():
                    at.append(self.clock.now)
            return bool(at) and self.clock.handled % 64 == 0 and self.is_training()

        self.clock.run(began + limit, look)
        busiest = max(
            self.sent.keys() | self.received.keys(), key=lambda one: self.sent[one] + self.received[one], default=0
        )
        row = {
            "nodes": self.plan.nodes,
            "what": what,
            "decided": round(at[0] - began, 2) if at else None,
            "training": round(self.clock.now - began, 2),
            "cpu": round(self.cpu, 2),
            "messages": self.sent[busiest] + self.received[busiest],
            "megabytes": round(max(self.bytes.values(), default=0) / 1e6, 2),
            "simulated in": round(time.process_time() - real, 1),
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)


def run(nodes: int, only: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Let everything happen to a job of this size."""
    most = nodes * _RANKS
    plan = Plan(
        seed=nodes,
        nodes=nodes,
        ranks_per_node=_RANKS,
        least=_RANKS,
        steps=10_000,
        step_seconds=5.0,
        save_every=100_000,
        max_restarts=1_000,
        silence=_SILENCE,
        process_seconds=(3.0, 5.0),
        coarseness=5.0,
    )
    cluster = ManyNodes(plan)
    cluster.only = only

    def lost(count: int) -> Callable[[], bool]:
        before = sum(len(names) for kind, names in _lost(cluster))
        return lambda: sum(len(names) for kind, names in _lost(cluster)) >= before + count

    def decisions(kind: str) -> Callable[[], bool]:
        before = sum(1 for decision in cluster.decisions if decision[0] == kind)
        return lambda: sum(1 for decision in cluster.decisions if decision[0] == kind) > before

    cluster.measure("start", lambda: None, lambda: any(one.node is not None for one in cluster.processes), limit=600.0)
    cluster.clock.run(cluster.clock.now + 7.0)
    rank = next(iter(cluster.processes[nodes // 2].ranks.values()))
    cluster.measure("a lost rank", lambda: rank.exit(-9), decisions("replace"))
    cluster.clock.run(cluster.clock.now + 7.0)
    cluster.measure("a lost node", cluster.processes[nodes // 3].kill, lost(1))
    cluster.clock.run(cluster.clock.now + 7.0)
    switch = [cluster.processes[number] for number in range(nodes * 5 // 8, nodes * 5 // 8 + _RACK)]
    cluster.measure("64 nodes at once", lambda: _each(switch, Launcher.kill), lost(_RACK))
    cluster.clock.run(cluster.clock.now + 7.0)
    dark = cluster.processes[nodes // 5]

    def power_loss() -> None:
        cluster.dark.add(dark.machine)
        dark.kill()

    cluster.measure("a node without power", power_loss, lost(1))
    cluster.clock.run(cluster.clock.now + 7.0)
    cluster.measure("the leader", cluster.leader.kill, decisions("leads"))
    cluster.clock.run(cluster.clock.now + 7.0)
    machines = [0, *range(nodes, nodes + _RACK - 1)]  # the first node is started again: the others meet there
    before = len(cluster.leader.nodes)
    cluster.measure(
        "a rack of 64 more", lambda: _each(machines, cluster.start), lambda: len(cluster.leader.nodes) >= before + _RACK
    )
    quiet = cluster.received[cluster.leader.number]
    cluster.received.clear()
    cluster.clock.run(cluster.clock.now + 20.0)
    quiet = cluster.received[cluster.leader.number]
    beats = len(cluster.leader.nodes) / cluster.leader.members.period if cluster.leader.members else 0.0
    print(json.dumps({"nodes": nodes, "what": "20 quiet seconds", "messages": quiet, "heartbeats per second": beats}))

    def finish() -> None:
        for rank in [rank for one in cluster.processes if one.alive for rank in one.ranks.values()]:
            rank.group = None
            rank.exit(0)

    cluster.invariants.trained_to_end = True
    cluster.measure("the end", finish, lambda: cluster.is_over(), limit=60.0)
    print(
        json.dumps(
            {"nodes": nodes, "simulator MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "most": most}
        )
    )
    return cluster.rows


def _lost(cluster: Cluster) -> list[tuple[Any, ...]]:
    return [decision for decision in cluster.decisions if decision[0] == "lost"]


def _each(items: Iterable[Any], call: Callable[[Any], Any]) -> None:
    for item in items:
        call(item)


def main() -> int:
    """Measure some sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1024])
    parser.add_argument("--only", nargs="+", default=[], help="the events to measure")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    share_lists()
    rows = [row for nodes in arguments.nodes for row in run(nodes, tuple(arguments.only))]
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
