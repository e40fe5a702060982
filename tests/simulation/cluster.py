"""A job under simulation: machines, launchers, a shared folder, and the faults of its plan."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.host.wire import Wire, encode
from phalanx.launch.environment import NodeInfo
from phalanx.recovery.launcher import protocol
from phalanx.recovery.launcher.control import first_view
from phalanx.recovery.launcher.view import GroupView
from phalanx.recovery.messages import NodeView
from tests.simulation.invariants import Invariants
from tests.simulation.launcher import Launcher, Store
from tests.simulation.network import Clock, Network
from tests.simulation.plan import Fault, Plan
from tests.simulation.ranks import Folder, GroupKey, RankGroup

_QUIET_SECONDS = 400.0
"""So long after the last fault every launcher has ended."""


class Violation(AssertionError):
    """An invariant that does not hold."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Cluster:
    """All machines of a job."""

    def __init__(self, plan: Plan, *, detailed: bool = False) -> None:
        """`detailed`: whether the history has the messages of ranks and their orders."""
        self.detailed = detailed
        self.plan = plan
        self.rng = random.Random(plan.seed ^ 0x5EED)
        self.clock = Clock()
        self.network = Network(self.clock, self.rng, plan.delay)
        self.history: list[str] = []
        self.decisions: list[tuple[Any, ...]] = []
        self.invariants = Invariants(self)
        self.folder = Folder(self)
        self.groups: dict[GroupKey, RankGroup] = {}
        self.processes: list[Launcher] = []
        self._newest: dict[int, Launcher] = {}
        self.died: dict[int, float] = {}
        self.dark: set[int] = set()
        """Machines without power: nothing there refuses a connection."""
        self.clocks: dict[int, tuple[float, float]] = {}
        self.launches: dict[str, int] = {}
        """The launches of this job, in the order of their beginning, by the names of their runs."""
        self.unread: dict[int, list[Any]] = {}
        self.launchers_by_name: dict[tuple[str, Store], Launcher] = {}
        self.sent: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.measures = False
        self.finished_at: float | None = None
        self._slow_links = 0
        self._machines = plan.nodes
        for machine in range(plan.nodes):
            self.start(machine)
        for fault in plan.faults:
            self.clock.at(fault.at, lambda fault=fault: self.happen(fault))

    # --- what launchers use -------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a line to the history."""
        self.history.append(f"{self.clock.now:9.3f} {text}")

    def brief(self) -> float:
        """Return how long a message between processes of one machine takes."""
        return self.rng.uniform(0.0001, 0.01)

    def start(self, machine: int) -> Launcher:
        """Start a launcher on a machine."""
        skew = self.plan.skew
        self.clocks.setdefault(machine, (self.rng.uniform(0.0, 1e4), 1.0 + self.rng.uniform(-skew, skew)))
        self.dark.discard(machine)
        launcher = Launcher(self, machine, len(self.processes))
        self.processes.append(launcher)
        self._newest[machine] = launcher
        self.note(f"machine{machine}: launcher {launcher.number} starts")
        return launcher

    def running(self, machine: int) -> Launcher | None:
        """Return the launcher that runs on a machine."""
        launcher = self._newest.get(machine)
        return launcher if launcher is not None and launcher.alive else None

    def endpoint_store(self) -> Store | None:
        """Return the store at the endpoint, if one is hosted."""
        launcher = self.running(0)
        return None if launcher is None else launcher.endpoint

    def last_contact(self, own: Launcher, other: Launcher) -> float:
        """Return when a launcher could hear from another one last."""
        last = self.clock.now if other.alive else self.died[other.number]
        if other.paused_since is not None:
            last = min(last, other.paused_since)
        if not self.network.connected(own.machine, other.machine):
            last = min(last, self.network.cut_since(own.machine, other.machine))
        for began, ended in reversed(own.pauses):
            last = began if began < last < ended else last
        return last

    def beats(self, leader: Launcher, members: Any) -> dict[str, int]:
        """Return the heartbeat counters in a leader's store."""
        found = {}
        for name, entry in members.nodes.items():
            other = self.processes[entry["standby"][1]]
            if other is not leader and other.store is leader.store:
                found[name] = int(self.last_contact(leader, other) / members.period)
        return found

    def neighbour(self, own: Launcher, name: str) -> Launcher | None:
        """Return the launcher that a name means to another one."""
        entry = own.nodes.get(name) or (own.members.nodes.get(name) if own.members else None)
        return None if entry is None else self.processes[entry["standby"][1]]

    def by_name(self, name: str, room: tuple[Any, int], own: Launcher) -> Launcher | None:
        """Return the launcher that reads the mail of a name in a store."""
        return self.launchers_by_name.get((name, room[0])) or self.neighbour(own, name)

    def is_dark(self, machine: int) -> bool:
        """Whether a machine has no power."""
        return machine in self.dark

    def group(self, key: GroupKey, size: int) -> RankGroup:
        """Return the group of ranks with this key."""
        if key not in self.groups:
            self.groups[key] = RankGroup(self, key, size)
        return self.groups[key]

    def first_view(self, place: NodeInfo, failures: int) -> GroupView:
        """Return the view that a launcher begins with."""
        return first_view(place, failures)

    def on_death(self, launcher: Launcher) -> None:
        """Note that a launcher has ended; `scale` lets those that have a connection to it notice."""

    def machines_of(self, nodes: Mapping[str, Any]) -> list[list[Any]]:
        """Return nodes as a `NodeInfo` has them."""
        return [[name, entry["host"], entry["ranks"], entry["standby"]] for name, entry in nodes.items()]

    def entries_of(self, view: Any) -> dict[str, Any]:
        """Return a view's nodes as entries."""
        return self.entries_from(view.nodes)

    def entries_from(self, nodes: Mapping[str, NodeView | None]) -> dict[str, Any]:
        """Return nodes as entries, as the membership has them."""
        return {
            name: None
            if node is None
            else {"host": node.host, "ranks": node.slots, "standby": list(node.standby or ())}
            for name, node in nodes.items()
        }

    def is_near(self, room: Any, name: str) -> bool:
        """Whether a machine reads the list of all from the leader, and not from another machine."""
        return room.places[name].list_at is None

    def timed(self, launcher: Launcher, event: Any, call: Callable[[], list[protocol.Action]]) -> list[protocol.Action]:
        """Call something; `scale` measures how long it takes."""
        return call()

    def size(self, mails: Any) -> int:
        """Return the bytes of mail, if they are measured."""
        if not self.measures:
            return 0
        return len(json.dumps(mails, default=lambda value: encode(value) if isinstance(value, Wire) else str(value)))

    def count(self, source: Launcher, target: Launcher, kind: str, size: int) -> None:
        """Count a message."""
        self.sent[source.number] += 1
        self.received[target.number] += 1
        self.bytes[source.number] += size
        self.bytes[target.number] += size

    # --- faults -------------------------------------------------------------------------------------------------------

    def happen(self, fault: Fault) -> None:
        """Let a fault happen."""
        self.note(f"FAULT {fault}")
        getattr(self, f"_{fault.kind}")(fault)

    def _after(self, fault: Fault, call: Callable[[], None]) -> None:
        if fault.seconds != float("inf"):
            self.clock.later(fault.seconds, call)

    def _kill_rank(self, fault: Fault, code: int = -9) -> None:
        launcher = self.running(fault.machine)
        ranks = [rank for rank in launcher.ranks.values() if rank.alive] if launcher else []
        if ranks:
            ranks[fault.value % len(ranks)].exit(code)

    def _usage_error(self, fault: Fault) -> None:
        self._kill_rank(fault, 2)

    def _kill_launcher(self, fault: Fault) -> None:
        launcher = self.running(fault.machine)
        if launcher is not None:
            launcher.kill()

    _kill_machine = _kill_launcher

    def _power_loss(self, fault: Fault) -> None:
        self.dark.add(fault.machine)
        self._kill_launcher(fault)

    def _restart(self, fault: Fault) -> None:
        self._kill_launcher(fault)
        if self.plan.restarts:
            self.clock.later(min(fault.seconds, 30.0), lambda: self._start_again(fault.machine))

    def _start_again(self, machine: int) -> None:
        if self.running(machine) is None and machine not in self.dark:
            self.start(machine)

    def _pause(self, fault: Fault) -> None:
        launcher = self.running(fault.machine)
        if launcher is not None:
            launcher.pause()
            self.clock.later(min(fault.seconds, 60.0), launcher.go_on)

    def _cut_pairs(self, fault: Fault, pairs: list[tuple[int, int]]) -> None:
        for pair in pairs:
            self.network.cut(*pair)
        self._after(fault, lambda: [self.network.mend(*pair) for pair in pairs] and None)

    def _cut(self, fault: Fault) -> None:
        if fault.machine != fault.other:
            self._cut_pairs(fault, [(fault.machine, fault.other), (fault.other, fault.machine)])

    def _one_way(self, fault: Fault) -> None:
        if fault.machine != fault.other:
            self._cut_pairs(fault, [(fault.machine, fault.other)])

    def _partition(self, fault: Fault) -> None:
        rng = random.Random(fault.value * 7919 + fault.machine)
        machines = list(range(self._machines))
        here = set(rng.sample(machines, max(1, len(machines) // rng.choice([2, 3, 4]))))
        self._cut_pairs(fault, [(one, two) for one in machines for two in machines if (one in here) != (two in here)])

    def _disk(self, fault: Fault) -> None:
        self.folder.fill(fault.machine)
        self.clock.later(min(fault.seconds, 30.0), lambda: self.folder.free(fault.machine))

    def _resize(self, fault: Fault) -> None:
        launcher = self.running(fault.machine)

        def ask() -> None:
            if launcher is not None and launcher.node is not None and launcher.node.takes_requests:
                launcher.handle(protocol.Resized(fault.value))

        if launcher is not None:
            launcher.guard(ask)()

    def _arrive(self, fault: Fault) -> None:
        self.start(self._machines)
        self._machines += 1

    def _slow(self, fault: Fault) -> None:
        self._slow_links += 1
        self._set_slowness()
        self.clock.later(min(fault.seconds, 30.0), self._fast)

    def _fast(self) -> None:
        self._slow_links -= 1
        self._set_slowness()

    def _set_slowness(self) -> None:
        """20 times slower per fault; with more than two the way of a message would take minutes."""
        self.network.slowness = 20.0 ** min(2, self._slow_links)

    # --- run ----------------------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether no launcher runs."""
        return not any(launcher.alive for launcher in self.processes)

    def run(self) -> None:
        """Let the history happen; Violation if an invariant does not hold."""
        end = max(
            [fault.at + (fault.seconds if fault.seconds < 100.0 else 0.0) for fault in self.plan.faults], default=0.0
        )
        end += self.plan.steps * self.plan.step_seconds + _QUIET_SECONDS
        if any(fault.seconds == float("inf") for fault in self.plan.faults):
            end += 4 * _QUIET_SECONDS  # collectives that wait for ever time out, one after the other
        last = max([fault.at + 35.0 for fault in self.plan.faults], default=0.0)
        self.clock.run(end, lambda: self.is_over() and self.clock.now > last)
        self.invariants.at_end()
