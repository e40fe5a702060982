"""The launchers of thousands of nodes: what one start, loss, takeover or arrival costs the node that leads.

    python -m tests.simulation.scale --nodes 1024 4096 16384

The state machines are those of every launcher; lists that all nodes have in common are kept once. Virtual seconds say
when a decision was made and when all ranks trained again, with links of 50 us to 1 ms and the start of processes as
given; CPU seconds are those of this machine in the state machines of the leader.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from phalanx.launch import membership
from phalanx.launch.environment import NodeInfo
from phalanx.recovery.launcher import node, protocol, view
from phalanx.recovery.launcher.view import GroupView
from phalanx.recovery.messages import FromRank, Orders
from tests.simulation.cluster import Cluster
from tests.simulation.launcher import Launcher
from tests.simulation.plan import Plan

_RANKS = 8
_SILENCE = 10.0
_LINK_SECONDS = 0.3
"""How often neighbours ask each other."""
_RACK = 64
_SETTLED_SECONDS = 6.0
_REMEMBERED = 32
"""How many results of a function are kept for the other nodes."""


class _Shared:
    """Remembers what a function has made of the same objects: what all nodes compute is computed once."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._made: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, *arguments: Any) -> Any:
        key = tuple(map(self._identity, arguments))
        if key not in self._made:
            if len(self._made) >= _REMEMBERED:
                del self._made[next(iter(self._made))]
            self._made[key] = (self._call(*arguments), arguments)  # which keeps the identities
        return self._made[key][0]

    @staticmethod
    def _identity(argument: Any) -> Any:
        """Return the same for the same object, and for two short dicts with the same entries."""
        if isinstance(argument, Mapping) and len(argument) <= _RACK:
            return tuple((name, id(entry)) for name, entry in argument.items())
        return id(argument)


def share_lists() -> None:
    """Let the nodes of this process share lists that are the same."""
    membership.changed = view.changed = _Shared(membership.changed)  # type: ignore[assignment]
    membership.in_order = _Shared(membership.in_order)  # type: ignore[assignment]
    node.came_or_went = _Shared(node.came_or_went)  # type: ignore[assignment]


def footprint(*roots: Any) -> int:
    """Return the bytes of what these objects refer to, without the simulator around them."""
    seen, found, rest = set[int](), 0, list(roots)
    while rest:
        each = rest.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType, Cluster, Launcher)):
            continue
        seen.add(id(each))
        found += sys.getsizeof(each)
        rest += [*gc.get_referents(each), vars(each)] if hasattr(each, "__dict__") else gc.get_referents(each)
    return found


class ManyNodes(Cluster):
    """A cluster whose nodes share what is the same, and whose leader is measured."""

    def __init__(self, plan: Plan) -> None:
        self._views: dict[int, Mapping[str, Any]] = {}
        self._machines_of: tuple[Any, list[Any]] = (None, [])
        self._entries: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._leading: Launcher | None = None
        self._sizes: dict[tuple[Any, ...], int] = {}
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
        """Return the bytes of mail; reports of ranks and orders have the size of the first one of their kind."""
        return sum(map(self._size_of, mails))

    def _size_of(self, mail: Any) -> int:
        wire = mail[-1]
        kind: tuple[Any, ...]
        if isinstance(wire, FromRank):
            kind = (type(wire.message),)
        elif isinstance(wire, Orders):
            kind = (len(wire.orders), type(wire.orders[0][1]), type(wire.orders[-1][1]))
        else:
            return super().size(mail)
        if kind not in self._sizes:
            self._sizes[kind] = super().size(mail)
        return self._sizes[kind]

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

    def neighbours(self, first: int) -> list[Launcher]:
        """Return the launchers of a rack of nodes that follow each other in the ring of names."""
        names = membership.in_order(self.leader.nodes)
        return [one for name in names[first : first + _RACK] if (one := self.neighbour(self.leader, name)) is not None]

    def cut_power(self, launchers: Iterable[Launcher]) -> None:
        """Let machines lose their power: nothing there refuses a connection."""
        for launcher in launchers:
            self.dark.add(launcher.machine)
            launcher.kill()

    def finish(self) -> None:
        """Take the last step."""
        group = max(self.groups.values(), key=lambda group: group.key)
        self.plan = dataclasses.replace(self.plan, steps=group.step + 1)
        group._take_step()

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
        leading = None if self._leading is None else self._leading.node
        return leading is not None and leading.group is not None and leading.group.is_settled

    def measure(
        self, what: str, cause: Callable[[], None], decided: Callable[[], bool], limit: float = 300.0, every: int = 64
    ) -> None:
        """Let something happen; note when it is decided and when all train again, and what it costs.

        `every`: after how many events it is looked at.
        """
        if self.only and what not in self.only:
            return
        if self._leading is not None:  # the last event is over for all
            self.clock.run(self.clock.now + _SETTLED_SECONDS)
        self.sent.clear(), self.received.clear(), self.bytes.clear()
        self.cpu, began = 0.0, self.clock.now
        real = time.process_time()
        cause()
        at: list[float] = []
        seen = [-1]

        def look() -> bool:
            due = self.clock.handled % every == 0
            if not at and (due or len(self.decisions) != seen[0]):
                seen[0] = len(self.decisions)
                if decided():
                    at.append(self.clock.now)
            return bool(at) and due and (self.is_over() or self.is_training())

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
        coarseness=10.0,
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
    rank = next(iter(cluster.processes[nodes // 2].ranks.values()))
    cluster.measure("a lost rank", lambda: rank.exit(-9), decisions("replace"))
    cluster.measure("a lost node", cluster.processes[nodes // 3].kill, lost(1))
    cluster.measure("64 nodes at once", lambda: _each(cluster.neighbours(nodes * 5 // 8), Launcher.kill), lost(_RACK))
    cluster.measure("a node without power", lambda: cluster.cut_power(cluster.neighbours(nodes // 5)[:1]), lost(1))
    cluster.measure("64 without power", lambda: cluster.cut_power(cluster.neighbours(nodes // 3)), lost(_RACK))
    cluster.measure("the leader", cluster.leader.kill, decisions("leads"))
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
    row: dict[str, Any] = {"nodes": nodes, "what": "20 quiet seconds", "messages": quiet}
    row["heartbeats per second"] = round(beats)
    row["leader MB"] = round(footprint(cluster.leader.node, cluster.leader.members) / 1e6, 1)
    cluster.rows.append(row)
    print(json.dumps(row), flush=True)

    cluster.measure("the end", cluster.finish, cluster.is_over, limit=60.0, every=1)
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
    gc.disable()  # nothing becomes garbage in cycles, and to look through millions of objects would count as work
    rows = [row for nodes in arguments.nodes for row in run(nodes, tuple(arguments.only))]
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
