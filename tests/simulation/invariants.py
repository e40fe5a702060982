"""What must hold in every history, after each event and at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.launcher import Launcher
    from tests.simulation.ranks import GroupKey, Rank, RankGroup


_WAKING_SECONDS = 2.0
"""How long a launcher may need to end its ranks after its machine stood still."""


class Unguaranteed(Exception):
    """What happened is outside what is guaranteed: the history ends."""


class Invariants:
    """Looks at a cluster, and raises Violation."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._group: RankGroup | None = None
        """The group that took the last step."""
        self._retired: set[int] = set()
        self._step = self._held = 0
        """The last step, and the one whose state the ranks of a group hold."""
        self._views: dict[tuple[str, int, int], tuple[Any, ...]] = {}
        self._positions: dict[str, GroupKey] = {}
        self._places: dict[tuple[GroupKey, int], str] = {}
        self._begins: dict[int, int] = {}
        self.second_run_was_hidden = False
        """Whether the first machine began a run while those of another one could not tell it so."""
        self.trained_to_end = False
        self.usage_error = False
        self._waits: dict[tuple[int, str], float] = {}

    def _fail(self, name: str, text: str) -> None:
        from tests.simulation.cluster import Violation

        if name in ("split brain", "stale checkpoint", "steps taken twice") and self.second_run_was_hidden:
            self.cluster.note("a first machine that is cut off from the others has begun a second run: no guarantee")
            raise Unguaranteed

        self.cluster.note(f"VIOLATION {name}: {text}")
        raise Violation(name, text)

    # --- ranks --------------------------------------------------------------------------------------------------------

    def on_position(self, rank: Rank, key: GroupKey, position: Any) -> None:
        """A rank takes places of later and later groups only."""
        if key <= rank.place:
            self._fail("old order obeyed", f"{rank.key} is in {rank.place} and takes a place in {key}")

    def on_arrival(self, group: RankGroup, rank: Rank, number: int) -> None:
        """Every rank has one place, and every place one rank."""
        present = group.arrived.get(number)
        if present is not None and present is not rank:
            self._fail("two ranks in one place", f"{present.key} and {rank.key} are rank {number} of {group.key}")
        if rank in group.numbers:
            self._fail("a rank in two places", f"{rank.key} in {group.key}")

    def on_group(self, group: RankGroup, *, from_memory: bool) -> None:
        """A group goes on after the last step, or from the last checkpoint; a second copy of the run begins nowhere."""
        last = self._group
        if last is not None and group.key < last.key:
            self._fail("split brain", f"{group.key} forms after {last.key} has trained")
        self._begins[id(group)] = group.step
        if not from_memory:  # it goes back to a checkpoint, and so does who takes its state
            aside = [rank for rank in self._aside(group) if (rank.step or 0) > group.step]
            if aside:
                self._fail(
                    "state dropped", f"{group.key} begins at {group.step}, and {aside[0].key} has {aside[0].step}"
                )
            self._held = group.step
        if from_memory and last is not None and group.step < self._held and group.key[:2] == last.key[:2]:
            self._fail("steps taken twice", f"{group.key} goes on at {group.step}, and {self._held} was complete")

    def on_step(self, group: RankGroup) -> None:
        """One group trains at a time, and each step follows the one before."""
        if group is not self._group:
            if id(group) in self._retired and self._has_just_woken(group):
                self.cluster.note(f"{group.key} takes a step on machines that stood still: no guarantee")
                return
            if id(group) in self._retired:
                self._fail("split brain", f"{group.key} trains, and {self._group and self._group.key} did since")
            if self._group is not None:
                self._retired.add(id(self._group))
                if group.key < self._group.key:
                    self._fail("split brain", f"{group.key} trains after {self._group.key}")
            self._group = group
            begin = self._begins[id(group)]
            if group.step != begin + 1:
                self._fail("steps skipped", f"{group.key} begins with {group.step} after {begin}")
        elif group.step != self._step + 1:
            self._fail("steps skipped", f"{group.key}: {group.step} after {self._step}")
        self._step = self._held = group.step

    def _aside(self, group: RankGroup) -> list[Rank]:
        """Return the ranks that wait at the side of a group of their attempt, on machines that see it."""
        launchers = {rank.launcher for rank in group.arrived.values()}
        leader = next(iter(launchers))
        near = [
            one
            for one in self.cluster.processes
            if one.runs and one not in launchers and (one.launch, one.round, one.term) == (*group.key[:2], leader.term)
        ]
        network = self.cluster.network
        near = [one for one in near if network.connected(one.machine, leader.machine)]
        return [rank for one in near for rank in one.ranks.values() if rank.alive and rank.group is None]

    def _has_just_woken(self, group: RankGroup) -> bool:
        """Whether all machines of a group stood still, so that its launchers have had no time to end its ranks."""
        launchers = {rank.launcher for rank in group.arrived.values()}
        return all(one.pauses and self.cluster.clock.now - one.pauses[-1][1] < _WAKING_SECONDS for one in launchers)

    def on_finish(self, group: RankGroup) -> None:
        """The last step is complete."""
        if self.trained_to_end and self._group is not group:
            self._fail("split brain", f"{group.key} finishes the run a second time")
        self.trained_to_end = True

    def on_checkpoint(self, key: GroupKey, step: int) -> None:
        """No group publishes after a later one has begun."""
        if self._group is not None and key < self._group.key:
            self._fail("stale checkpoint", f"{key} publishes step {step} after {self._group.key} has trained")

    # --- launchers ----------------------------------------------------------------------------------------------------

    def on_mail(self, launcher: Launcher, sender: str, message: Any) -> None:
        """Nothing to check before it is read: `on_event` sees what came of it."""
        self._last_mail = (sender, message)

    def on_event(self, launcher: Launcher) -> None:
        """After each event of a launcher."""
        node = launcher.node
        if node is None:
            return
        view = node.view
        if launcher.plan.coarseness > 1:  # too many nodes to compare after every event
            return
        facts = tuple(sorted((name, entry.ranks) for name, entry in view.nodes.items()))
        if view.version:
            key = (f"{launcher.run_id}/{launcher.round}", view.recent[-1].term, view.version)
            if self._views.setdefault(key, facts) != facts:
                self._fail(
                    "views differ", f"{launcher.own} has {facts} in version {key}, another one {self._views[key]}"
                )
        group = node.group
        if group is None:
            return
        gone = {name for name, count in group.starting.items() if count > 0 and name not in view.nodes}
        gone |= {rank.node for rank in group.members if rank.alive and rank.node not in view.nodes}
        if gone and not launcher._stopping and group.state != "starting":
            self._fail("waits for a lost node", f"{launcher.own} ({group.state}) for {sorted(gone)}")
        if launcher.members is not None and launcher.members.phase == "settled" and not launcher._stopping:
            strangers = view.nodes.keys() ^ launcher.members.nodes.keys()
            if strangers:
                self._fail(
                    "views differ", f"the agent and the launcher of {launcher.own} differ in {sorted(strangers)}"
                )

    def on_exit(self, launcher: Launcher) -> None:
        """An exit code says what has happened."""
        if launcher.exit_code == 0 and not self.trained_to_end:
            self._fail("wrong exit code", f"{launcher.own} exits with 0, and the run is not complete")

    def on_restart(self, launcher: Launcher, outcome: Any) -> None:
        """A usage error would be the same again."""
        if outcome.failure is not None and outcome.failure.cause.endswith("ended with 2"):
            self._fail("usage error tried again", f"{launcher.own} starts again: {outcome.failure.cause}")

    def on_begin(self, launcher: Launcher) -> None:
        """A first machine that is started again begins a second run only if the others cannot tell it so."""
        others = [
            one
            for one in self.cluster.processes
            if one.alive and one.run_id and one.launch < launcher.launch
            if one.members is None or one.members.leaves_signpost  # the former gather again, and know no one to tell
        ]
        reach = [
            one
            for one in others
            if one.members is not None and one.runs and self.cluster.network.connected(one.machine, launcher.machine)
        ]
        if launcher.leads and others and not reach:
            self.second_run_was_hidden = True

    # --- the end ------------------------------------------------------------------------------------------------------

    def at_end(self) -> None:
        """All launchers have ended, and those of a complete run with 0."""
        cluster = self.cluster
        running = [one for one in cluster.processes if one.alive]
        if running:
            states = [
                f"machine{one.machine} {one.own} leader={one.leader} leads={one.leads} "
                f"state={one.node.group.state if one.node and one.node.group else None} "
                f"phase={one.members.phase if one.members else None} "
                f"ranks={[(rank.key, rank.place, rank.why) for rank in one.ranks.values() if rank.alive]}"
                for one in running
            ]
            self._fail("deadlock", "; ".join(states))
        codes = {one.exit_code for one in cluster.processes}
        if self.trained_to_end and 0 not in codes and not cluster.plan.faults:
            self._fail("wrong exit code", f"the run is complete, and the launchers exit with {codes}")
        if not cluster.plan.faults and codes != {0}:
            self._fail("wrong exit code", f"nothing went wrong, and the launchers exit with {codes}")
