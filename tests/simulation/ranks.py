"""Ranks as the launcher sees them: they join, step together, leave, save, finish and crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.host.wire import Wire
from phalanx.recovery.messages import (
    Abort,
    End,
    LeaveAtStep,
    Position,
    RankAborted,
    RankInterrupted,
    RankJoined,
    RankReady,
    Release,
)

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.launcher import Launcher

GroupKey = tuple[int, int, int, int]
"""Launch, round, term and generation: the order of all groups of a job."""


_TIMEOUT_SECONDS = 60.0
"""How long a collective waits."""


class Rank:
    """One process."""

    def __init__(self, launcher: Launcher, key: str, slot: int, local_rank: int) -> None:
        self.launcher, self.key, self.slot, self.local_rank = launcher, key, slot, local_rank
        self.cluster = launcher.cluster
        self.alive = True
        self.reaped = False
        """Whether the launcher knows that it has ended."""
        self.step: int | None = None
        """The last complete step of the state that it holds; None: it has none."""
        self.place: GroupKey = (launcher.launch, launcher.round, launcher.term, -1)
        self.group: RankGroup | None = None
        self.has_stepped = False
        """Whether its group took a step."""
        self.why: str | None = None
        self._released = False
        self._waits_for_release = self._ends = False

    def say(self, message: Wire) -> None:
        """Send a message to the launcher."""
        self.note("says", message)
        self.cluster.clock.later(self.cluster.brief(), lambda: self.launcher.on_rank_message(self, message))

    def note(self, what: str, *message: Wire) -> None:
        """Add a line to a detailed history."""
        if self.cluster.detailed:
            self.launcher.note(" ".join(map(str, [f"  {self.key}", what, *message]))[:200])

    def on_order(self, order: Wire) -> None:
        """Obey the launcher."""
        self.note("gets", order)
        if not self.alive:
            return
        if isinstance(order, Abort):
            self.why, self._released = order.why, False
            self.say(RankAborted())
            self.leave(order.why)
        elif isinstance(order, Release):
            self._release()
        elif isinstance(order, LeaveAtStep) and self.group is not None:
            self.group.leave_for = order.why
        elif isinstance(order, Position):
            self.take(order)
        elif isinstance(order, End):
            self._ends = True
            if self.group is None:
                self.exit(0)

    def take(self, position: Position) -> None:
        """Take a place in the next group."""
        key = (self.launcher.launch, self.launcher.round, position.term, position.generation)
        self.cluster.invariants.on_position(self, key, position)
        self.place, self.why, self._released, self.has_stepped = key, None, False, False
        self.cluster.group(key, position.world_size).arrive(self, position.rank)

    def leave(self, why: str) -> None:
        """Leave the group, and report the last complete step when that may be done."""
        group, self.group = self.group, None
        if group is None:  # it has left already
            return
        group.on_left(self)
        if self.cluster.plan.needs_release and not self._released:
            self._waits_for_release = True
            self.say(RankInterrupted(why))
        else:
            self._ready(why)

    def _release(self) -> None:
        self._released = True
        if self._waits_for_release:
            self._waits_for_release = False
            self._ready(self.why or "released")

    def _ready(self, why: str) -> None:
        self.cluster.clock.later(self.cluster.brief(), lambda: self._say_ready(why))

    def _say_ready(self, why: str) -> None:
        if self._ends:
            self.exit(0)
        elif self.alive and self.group is None:
            group = self.cluster.groups.get(self.place)
            if group is not None:
                group.forget(self)
            self.say(RankReady(why, -1 if self.step is None else self.step, self.has_stepped))

    def exit(self, code: int) -> None:
        """End the process."""
        if not self.alive:
            return
        self.alive = False
        self.note(f"exits with {code} after step {self.step}")
        group, self.group = self.group, None
        for each in (group, self.cluster.groups.get(self.place)):
            if each is not None:
                each.on_death(self)
        self.launcher.on_rank_exit(self, code)


class RankGroup:
    """The ranks of one generation: they meet, share the state, and take steps together."""

    def __init__(self, cluster: Cluster, key: GroupKey, size: int) -> None:
        self.cluster, self.key, self.size = cluster, key, size
        self.arrived: dict[int, Rank] = {}
        self.numbers: dict[Rank, int] = {}
        """The other way round: at scale no rank looks through all others."""
        self.joined = False
        self.broken = False
        self.step = 0
        self.leave_for = ""
        self._waits_since: float | None = None

    def arrive(self, rank: Rank, number: int) -> None:
        """Meet the others at their store."""
        self.cluster.invariants.on_arrival(self, rank, number)
        self.arrived[number], self.numbers[rank] = rank, number
        rank.group = self
        if len(self.arrived) == self.size and not self.broken:
            self.cluster.clock.later(self.cluster.rng.uniform(0.05, 0.4), self._join)
        elif self.broken:
            self._tell(rank)

    def _stands(self) -> bool:
        ranks = list(self.arrived.values())
        if self.broken or len(ranks) < self.size:
            return False
        if not all(rank.alive and rank.group is self and rank.launcher.runs for rank in ranks):
            return False
        machines = {rank.launcher.machine for rank in ranks} if self.cluster.network.is_cut else set()
        return all(self.cluster.network.connected(one, other) for one in machines for other in machines)

    def _join(self) -> None:
        if self.broken:
            return
        if not self._stands():  # cut off, or a machine stands still: it goes on when that has ended
            if not self._has_timed_out():
                self.cluster.clock.later(0.5, self._join)
            return
        self._waits_since = None
        steps = [rank.step for rank in self.arrived.values() if rank.step is not None]
        self.step = max(steps) if steps else self.cluster.folder.newest()
        self.cluster.invariants.on_group(self, from_memory=bool(steps))
        self.joined = True
        self.cluster.folder.fence(self.key)
        for rank in self.arrived.values():
            rank.step = self.step
            rank.say(RankJoined(self.key[3]))
        self._schedule()

    def _has_timed_out(self) -> bool:
        """Whether a collective has waited for too long: then its ranks leave, or end if they have never joined."""
        if self._waits_since is None:
            self._waits_since = self.cluster.clock.now
        if self.cluster.clock.now - self._waits_since < _TIMEOUT_SECONDS:
            return False
        for rank in list(self.arrived.values()):
            if rank.alive and rank.group is self and rank.launcher.runs:
                if self.key[3] == 0 and not self.joined:
                    rank.exit(1)
                else:
                    rank.leave("a collective timed out")
        return self.broken

    def _schedule(self) -> None:
        self.cluster.clock.later(self.cluster.plan.step_seconds, self._take_step)

    def _take_step(self) -> None:
        if self.broken:
            return
        if not self._stands():
            if not self._has_timed_out():
                self._schedule()
            return
        self._waits_since = None
        if self.leave_for:
            self._dissolve()
            return
        self.step += 1
        self.cluster.invariants.on_step(self)
        for rank in self.arrived.values():
            rank.step, rank.has_stepped = self.step, True
        if self.step % self.cluster.plan.save_every == 0 or self.step >= self.cluster.plan.steps:
            self._save()
        if self.step >= self.cluster.plan.steps:
            self._finish()
        else:
            self._schedule()

    def _save(self) -> None:
        writer, step = self.arrived[0], self.step

        def publish() -> None:
            if not writer.alive or writer.place != self.key:  # a save that its group does not end is given up
                return
            if self.cluster.folder.is_full(writer.launcher.machine) or not self.cluster.folder.publish(self.key, step):
                writer.exit(1)

        seconds = 0.0 if self.step >= self.cluster.plan.steps else self.cluster.rng.uniform(0.1, 1.5)
        if seconds:
            self.cluster.clock.later(seconds, publish)
        else:
            publish()

    def _finish(self) -> None:
        if not all(rank.alive for rank in self.arrived.values()):
            self._schedule()
            return
        self.cluster.invariants.on_finish(self)
        for rank in list(self.arrived.values()):
            self.cluster.clock.later(self.cluster.brief(), lambda rank=rank: self._end(rank))

    def _end(self, rank: Rank) -> None:
        if rank.alive and rank.group is self:
            rank.group = None
            self.forget(rank)
            self.broken = True
            rank.exit(0)

    def _dissolve(self) -> None:
        why, self.broken = self.leave_for, True
        for rank in list(self.arrived.values()):
            rank.group = None
            rank._ready(why)

    def on_left(self, rank: Rank) -> None:
        """Note a rank that leaves."""
        self.broken = True

    def forget(self, rank: Rank) -> None:
        """Note a rank that waits for another place."""
        if rank in self.numbers:
            del self.arrived[self.numbers.pop(rank)]

    def on_death(self, rank: Rank) -> None:
        """Let the others notice a lost rank, if the connections say so; some may have the step that it had."""
        if self.broken:  # the others know
            return
        finished = self.step >= self.cluster.plan.steps
        self.broken = self.broken or not finished
        for other in list(self.arrived.values()):
            if other is not rank and not finished:
                self._tell(other)

    def _tell(self, rank: Rank) -> None:
        def notice() -> None:
            if rank.alive and rank.group is self and rank.why is None:
                rank.leave("a connection was closed")

        if self.cluster.rng.random() < 0.7:  # a rank may also wait for one that is not lost
            self.cluster.clock.later(self.cluster.rng.uniform(0.0, 0.3), notice)


class Folder:
    """The checkpoint folder of the run, which all machines see."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.checkpoints: list[tuple[int, GroupKey]] = []
        self.newest_group: GroupKey = (-1, -1, -1, -1)
        self.refused = 0
        self._full: set[int] = set()

    def newest(self) -> int:
        """Return the step to begin with."""
        return self.checkpoints[-1][0] if self.checkpoints else 0

    def fence(self, key: GroupKey) -> None:
        """Let no group before this one publish from now on."""
        self.newest_group = max(key, self.newest_group)

    def publish(self, key: GroupKey, step: int) -> bool:
        """Publish a checkpoint; False if a later group trains."""
        if key < self.newest_group and key[0] == self.newest_group[0]:
            self.refused += 1
            self.cluster.note(f"the folder refuses step {step} of group {key}")
            return False
        self.checkpoints.append((step, key))
        self.cluster.invariants.on_checkpoint(key, step)
        return True

    def is_full(self, machine: int) -> bool:
        """Whether a machine's disk is full."""
        return machine in self._full

    def fill(self, machine: int) -> None:
        """Fill a machine's disk."""
        self._full.add(machine)

    def free(self, machine: int) -> None:
        """Free it again."""
        self._full.discard(machine)
