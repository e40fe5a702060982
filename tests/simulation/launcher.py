"""A launcher: the real state machines of a node, and between them what its adapters do.

`Membership`, `Roster` and `Node` decide; this class carries out what they say over the simulated network, as
`launch.nodes`, `launch.gathering`, `launch.attempt` and `recovery.launcher.control` do over the real one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.errors import EXIT_USAGE, PhalanxError, UsageError
from phalanx.host.wire import Wire
from phalanx.launch import agent_messages as mail
from phalanx.launch import membership
from phalanx.launch.environment import NodeInfo
from phalanx.launch.failure import FailureReport
from phalanx.launch.gathering import Roster, refusal
from phalanx.launch.launcher_loop import Outcome, may_restart
from phalanx.launch.membership import Membership
from phalanx.launch.spec import Elastic
from phalanx.recovery.launcher import protocol
from phalanx.recovery.launcher.node import Node
from phalanx.recovery.messages import RankReady
from tests.simulation.ranks import Rank

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_AGENT_SECONDS, _LAUNCHER_SECONDS = 0.2, 0.5
"""How often the agent looks around, and the launcher at the time, if nothing else happens."""
_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 60.0
_BATCH_SECONDS = 0.005


class Store:
    """The store of a launcher: what machines that gather find in it, by round."""

    def __init__(self, owner: Launcher) -> None:
        self.owner = owner
        self.round = -1
        self.rooms: dict[int, Room] = {}
        self.moved: Store | None = None

    def room(self, number: int) -> Room:
        """Return what belongs to a round."""
        return self.rooms.setdefault(number, Room())


class Room:
    """One round of gathering."""

    def __init__(self) -> None:
        self.arrivals = 0
        self.entries: dict[str, Any] = {}
        self.waiting: dict[str, Launcher] = {}
        self.decided: dict[str, Any] | None = None
        self.places: dict[str, mail.NodePlace | mail.Refused] = {}

    def arrive(self, launcher: Launcher, entry: Any) -> str:
        """Take the entry of a machine; return its name."""
        self.arrivals += 1
        name = f"{self.arrivals:05d}"
        self.entries[name] = entry
        self.waiting[name] = launcher
        return name


class Launcher:
    """One launcher process with its agent, from its start to its exit code."""

    def __init__(self, cluster: Cluster, machine: int, number: int) -> None:
        self.cluster, self.machine, self.number = cluster, machine, number
        self.clock, self.plan = cluster.clock, cluster.plan
        self.identity = f"run{number}"
        self.exit_code: int | None = None
        self.alive = True
        self.paused_since: float | None = None
        self.pauses: list[tuple[float, float]] = []
        self._deferred: list[Callable[[], None]] = []
        self.standby = Store(self)
        self.endpoint: Store | None = None
        """The store at the endpoint, if this launcher hosts it."""
        self.store: Store | None = None
        self.leads = False
        self.own = self.leader = self.run_id = ""
        self.round = -1
        self.attempt = self.failures = 0
        self.attempts = 0
        self.nodes: Mapping[str, Any] = {}
        self.members: Membership | None = None
        self.roster: Roster | None = None
        self.node: Node | None = None
        self.ranks: dict[str, Rank] = {}
        self._added = 0
        self._outcome: Outcome | None = None
        self._all_over = False
        self._knows_failure = False
        self._mailbox = 0
        self._gathers = False
        """Counts the stores that mail was exchanged in: what arrives in an earlier one is not read."""
        self._out: list[tuple[str | tuple[str, ...], str, Wire]] = []
        self._asked: dict[str, float] = {}
        self._signpost = False
        self._stopping = False
        self._batching = self._looks_soon = False
        self._waiting: list[Any] = []
        self._unread_batches: list[Any] = []
        self.clock.later(cluster.rng.uniform(0.0, 1.0), self.guard(self._connect))
        self._tick_agent()
        self._tick_launcher()

    # --- process ------------------------------------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        """Whether the process runs, and its machine does not stand still."""
        return self.alive and self.paused_since is None

    @property
    def term(self) -> int:
        """The term of the view."""
        return 0 if self.node is None else self.node.view.term

    @property
    def launch(self) -> int:
        """The number of the launch that this launcher takes part in."""
        return self.cluster.launches.setdefault(self.run_id, len(self.cluster.launches))

    @property
    def now(self) -> float:
        """The time by this machine's clock."""
        offset, rate = self.cluster.clocks[self.machine]
        return offset + rate * self.clock.now

    def guard(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that happens while the process lives, and after a pause of its machine."""
        return functools.partial(self._call, call)

    def _call(self, call: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.paused_since is not None:
            self._deferred.append(self.guard(call))
        else:
            call()

    def pause(self) -> None:
        """Let the machine stand still."""
        if self.paused_since is None:
            self.paused_since = self.clock.now

    def go_on(self) -> None:
        """End a pause."""
        if self.paused_since is not None:
            self.pauses.append((self.paused_since, self.clock.now))
            self.paused_since = None
            deferred, self._deferred = self._deferred, []
            for call in deferred:
                call()

    def kill(self) -> None:
        """End the process, and with it its ranks."""
        if self.alive:
            self.alive = False
            self.cluster.died[self.number] = self.clock.now
            self.cluster.on_death(self)
            for rank in list(self.ranks.values()):
                rank.exit(-9)

    def _exit(self, code: int, why: str = "") -> None:
        if self.alive:
            self.exit_code = code
            self.note(f"exits with {code}{': ' + why if why else ''}")
            self.kill()
            self.cluster.invariants.on_exit(self)

    def note(self, text: str) -> None:
        """Add a line to the history."""
        self.cluster.note(f"{self.own or '-----'} machine{self.machine}: {text}")

    def _send(self, other: Launcher, call: Callable[[], None], kind: str = "", size: int = 0) -> None:
        """Let something happen in another launcher, after the way there."""
        self.cluster.count(self, other, kind, size)
        self.cluster.network.send(self.machine, other.machine, other.guard(call), (self.number, other.number))

    # --- rendezvous ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Host the store at the endpoint, or wait until there is one."""
        if self.machine == 0 and self.cluster.endpoint_store() is None:
            self.endpoint = self.store = Store(self)
            self.leads = True
            self._gather()
            return
        self._reach_endpoint(self.clock.now + _CONNECT_SECONDS)

    def _reach_endpoint(self, deadline: float) -> None:
        store = self.cluster.endpoint_store()
        if store is not None and self.cluster.network.connected(self.machine, 0):
            self.store = store
            self._gather()
        elif self.clock.now > deadline:
            self._exit(1, "no answer from the rendezvous endpoint")
        else:
            self.clock.later(0.5, self.guard(lambda: self._reach_endpoint(deadline)))

    def _gather(self) -> None:
        assert self.store is not None
        self.before = self.members.quorum() if self.members is not None and self.leads else None
        self.members = self.node = self.roster = None
        self._mailbox += 1
        self._gathers = True
        self.cluster.unread.pop(self.number, None)
        self._knows_failure = self._all_over = self._stopping = False
        self._outcome = None
        self.ranks, self._out, self._asked = {}, [], {}
        wanted, store = max(self.attempt, self.round + 1), self.store

        def agree() -> None:
            store.round = self.round = max(store.round, wanted)
            self._gathers = False
            room = store.room(self.round)
            entry = {"node_rank": self.machine, "host": f"machine{self.machine}", "ranks": self.plan.ranks_per_node}
            self.own = room.arrive(self, {**entry, "standby": ["", self.number]})
            self.cluster.launchers_by_name[self.own, store] = self
            if self.leads:
                expected = len(self.nodes) or self.plan.nodes
                self.roster = Roster(self.plan.request, "endpoint", self.now, self.before)
                self._lead_gathering(room, expected)
            else:
                self._wait_for_place(room, self.now + self.plan.request["seconds"] + 10.0)

        self._over_store(agree)

    def _over_store(self, call: Callable[[], None]) -> None:
        """Do something in the store, and go on when it has answered; a store that has ended ends this machine."""
        store = self.store
        assert store is not None

        def retry() -> None:
            if store.owner is not self and (not store.owner.alive):
                self._exit(1, "lost the node that hosts the rendezvous")
            elif store.owner is self or self.cluster.network.connected(self.machine, store.owner.machine):
                call()
            else:
                self.clock.later(0.5, self.guard(retry))

        self.clock.later(2 * self.cluster.network.one_way(), self.guard(retry))

    def _lead_gathering(self, room: Room, expected: int) -> None:
        roster = self.roster
        assert roster is not None
        if self._look_for_signpost():
            return
        now = self.now
        came = {name: entry for name, entry in room.entries.items() if name not in roster.entries}
        beats = {
            name: round(self.cluster.last_contact(self, launcher) / 2.0) for name, launcher in room.waiting.items()
        }
        roster.take(came, beats, now)
        try:
            taking_part = roster.complete(expected, now)
        except PhalanxError as error:
            for name in roster.entries:
                room.places[name] = refusal(error)
            self._stop(
                FailureReport(cause=error.message, exit_code=EXIT_USAGE if isinstance(error, UsageError) else 1),
                final=True,
            )
            return
        if taking_part is None:
            self.clock.later(
                _POLL_SECONDS * self.plan.coarseness, self.guard(lambda: self._lead_gathering(room, expected))
            )
            return
        facts = {"run_id": self.run_id or self.identity, "leader": self.own}
        room.places = roster.places(taking_part, facts)
        room.decided = {**roster.facts(taking_part, facts), "nodes": taking_part}
        for name, launcher in room.waiting.items():
            if launcher is not self:
                self.cluster.count(self, launcher, "place", 200)
                if name in taking_part and self.cluster.is_near(room, name):
                    self.cluster.count(self, launcher, "list", 100 * len(taking_part))
        self._start(vars(room.places[self.own]), taking_part)
        self.cluster.invariants.on_begin(self)

    def _wait_for_place(self, room: Room, deadline: float) -> None:
        if self._look_for_signpost():
            return
        store = self.store
        assert store is not None
        if not store.owner.alive:
            self._exit(1, "lost the node that hosts the rendezvous")
            return
        if self.cluster.network.connected(self.machine, store.owner.machine):
            place = room.places.get(self.own)
            if isinstance(place, mail.Refused):
                self._stop(FailureReport(cause=place.cause, exit_code=EXIT_USAGE if place.usage else 1), final=True)
                return
            if place is not None and room.decided is not None:
                self._start(vars(place), room.decided["nodes"])
                return
            if room.decided is not None:
                self._join_late(room.decided)
                return
        if self.now > deadline:
            self._exit(1, "no place")
            return
        wait = 0.25 if self.plan.coarseness == 1 else 1.0
        self.clock.later(wait, self.guard(lambda: self._wait_for_place(room, deadline)))

    def _look_for_signpost(self) -> bool:
        if self.store is None or self.store.moved is None or self.store is not self.cluster.endpoint_store():
            return False
        self.note(f"hears that the run goes on at machine{self.store.moved.owner.machine}")
        self.store, self.leads, self.round = self.store.moved, False, -1
        self._gather()
        return True

    def _join_late(self, run: dict[str, Any]) -> None:
        self.leader, self.run_id = run["leader"], run["run_id"]
        self.note("comes late")
        here = (f"machine{self.machine}", self.plan.ranks_per_node, ("", self.number))
        self._mail(self.leader, mail.NodeArrived(self.own, *here))
        self._wait_to_be_taken_in(self.now + self.plan.request["seconds"], self._mailbox)

    def _wait_to_be_taken_in(self, deadline: float, mailbox: int) -> None:
        if self.node is not None or self._mailbox != mailbox:
            return
        store = self.store
        assert store is not None
        if self.now > deadline or not store.owner.alive:
            self._exit(1, "the run did not take this machine in")
        elif store.round > self.round and self.cluster.network.connected(self.machine, store.owner.machine):
            self._gather()
        else:
            self.clock.later(0.25, self.guard(lambda: self._wait_to_be_taken_in(deadline, mailbox)))

    def _start(
        self, place: Mapping[str, Any], nodes: Mapping[str, Any], gone: Iterable[str] = (), new: Iterable[str] = ()
    ) -> None:
        """Begin the attempt with this place: fields of its `NodeInfo`."""
        self.clock.later(self.cluster.brief(), self.guard(self._read_waiting))
        self.nodes = nodes
        self.leader, self.run_id = place["leader"], place["run_id"]
        term = max(place.get("term", 0), self.term)
        self.members = Membership(self.own, self.plan.silence, self.now)
        self.members.begin(self.leader, nodes, self.now, term=term, gone=gone, new=new)
        late = place.get("late", False)
        fields = {name: value for name, value in place.items() if name != "list_at"}
        machines = self.cluster.machines_of(nodes)
        info = NodeInfo(
            **{"node_rank": 0, **fields, "own": self.own, "nodes": machines, "master_addr": "", "master_port": 0},
        )
        self.failures = max(self.failures, 0)
        view = self.cluster.first_view(info, self.failures)
        first = 0 if late else place["first_rank"]
        elastic = Elastic(self.plan.sizes, silence_seconds=self.plan.silence)
        local = [
            protocol.Rank(f"r{first + n}", self.own, first + n, first + n, n)
            for n in range(0 if late else self.plan.ranks_per_node)
        ]
        self.node = Node(
            self.own, view, elastic, local, max_restarts=self.plan.max_restarts, now=self.now, epoch=0.0, late=late
        )
        self.note(
            f"starts round {self.round} with {len(nodes)} nodes, leader {self.leader}" + (", late" if late else "")
        )
        for sender, message in self.cluster.unread.pop(self.number, []):
            self.clock.later(0.0, self.guard(lambda sender=sender, message=message: self.on_mail(sender, message)))
        if late:
            for slot in range(self.plan.ranks_per_node):
                self._start_rank(slot, late=True)
            return
        for rank in local:
            started = self.ranks[rank.key] = Rank(self, rank.key, rank.slot, rank.local_rank)
            seconds = self.cluster.rng.uniform(*self.plan.process_seconds)
            self.clock.later(
                seconds,
                self.guard(lambda started=started, rank=rank: self._begin_rank(started, rank.rank, info.world_size)),
            )

    def _begin_rank(self, rank: Rank, number: int, world_size: int) -> None:
        if rank.alive and rank.place[3] == -1:
            key = (self.launch, self.round, self.node.view.term if self.node else 0, 0)
            rank.place = key
            self.cluster.group(key, world_size).arrive(rank, number)

    # --- mail ---------------------------------------------------------------------------------------------------------

    def _mail(self, to: str | tuple[str, ...], message: Wire) -> None:
        """Send mail through the leader, as the mailbox does; what is sent within a moment travels together."""
        self._out.append((to, self.own, message))
        if not self._batching:
            self._batching = True
            self.clock.later(_BATCH_SECONDS, self.guard(self._deliver))

    def _deliver(self) -> None:
        self._batching = False
        batch, self._out = self._out, []
        if self.leads and self.members is not None:
            for to, mails in itertools.groupby(batch, key=lambda each: each[0]):
                self._distribute(to, [each[1:] for each in mails])
        elif batch:
            leader = self._leader_process()
            if leader is not None:
                room = (self.store, self.round)
                self._send(leader, lambda: leader.on_batch(room, batch), "mail", self.cluster.size(batch))

    def _leader_process(self) -> Launcher | None:
        return None if self.store is None else self.store.owner

    def on_batch(self, room: Any, batch: list[Any]) -> None:
        """As the leader: read what another machine has written into the store."""
        if not self.leads or self.store is not room[0] or self.round != room[1] or self._gathers:
            self._unread_batches.append((room, batch))  # it is in the store, and may be read later
            return
        for to, sender, message in batch:
            if to in (self.own, "leader"):
                self.on_mail(sender, message)
            else:
                self._distribute(to, [(sender, message)])

    def _distribute(self, to: str | tuple[str, ...], mails: list[tuple[str, Wire]]) -> None:
        room = (self.store, self.round)
        if to in (self.own, "leader", "all"):
            for sender, message in mails:
                self.clock.later(0.0, self.guard(lambda sender=sender, message=message: self.on_mail(sender, message)))
        if to == "all":
            names = [name for name in self.nodes if name != self.own]
        elif isinstance(to, str):
            names = [to] if to not in (self.own, "leader") else []
        else:
            names = list(to)
        size = self.cluster.size(mails)
        for name in names:
            other = self.cluster.by_name(name, room, self)
            if other is not None:
                self._send(other, lambda other=other, mails=mails: other.on_pushed(room, mails), "mail", size)

    def on_pushed(self, room: Any, mails: list[tuple[str, Wire]]) -> None:
        """Read what the leader has written for this machine, now or when this machine reads there."""
        if self.store is room[0] and self.round == room[1] and not self._gathers:
            for sender, message in mails:
                self.on_mail(sender, message)
        else:
            self._waiting.append((room, mails))

    def _read_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for room, mails in waiting:
            self.on_pushed(room, mails)
        batches, self._unread_batches = self._unread_batches, []
        for room, batch in batches:
            self.on_batch(room, batch)

    def on_mail(self, sender: str, message: Wire) -> None:
        """Read one message."""
        if not self.alive:
            return
        members = self.members
        match message:
            case mail.TakenIn(common, places, gone, new):
                if self.node is None:
                    place = {**common, **places[self.own]}
                    nodes = place.pop("nodes")
                    self._start({**place, "leader": self.leader, "run_id": self.run_id}, nodes, gone, new)
            case mail.NodeArrived():
                if self.node is not None and not self._stopping:
                    self.handle(message)
            case mail.RemoteFailure(failure) if self.node is not None:  # one that gathers reads it when it has begun
                if sender != self.own and not self._knows_failure:
                    self._knows_failure = True
                    self._stop(FailureReport.from_message(failure), publish=False)
            case mail.Accused(signs) if members is not None:
                members.on_accusation(signs, self.now)
                self._look_soon()
            case mail.Known(version) if members is not None:
                members.on_known(sender, version)
            case mail.Agreed(version) if members is not None and sender == self.leader:
                members.agree(version)
            case mail.Leads(term) if members is not None and sender == self.leader:
                members.confirm(term)
            case mail.Accused() | mail.Known() | mail.Agreed() | mail.Leads():
                pass
            case _ if self.node is None:
                self.cluster.unread.setdefault(self.number, []).append((sender, message))
            case _:
                self.cluster.invariants.on_mail(self, sender, message)
                self.handle(mail.Mailed(sender, message))

    # --- membership ---------------------------------------------------------------------------------------------------

    def _tick_agent(self) -> None:
        self.look_around()
        seconds = _AGENT_SECONDS * (1.0 if self.leads else self.plan.coarseness)
        self.clock.later(seconds * self.cluster.rng.uniform(0.9, 1.1), self.guard(self._tick_agent))

    def _look_soon(self) -> None:
        """Look around; where there are very many launchers, as an agent does: at all news of a moment together."""
        if self.plan.coarseness == 1:
            self.look_around()
        elif not self._looks_soon:
            self._looks_soon = True
            self.clock.later(_POLL_SECONDS, self.guard(self._look_again))

    def _look_again(self) -> None:
        self._looks_soon = False
        if self.members is not None and self.members.leads and self.members.looks_at > self.now:
            self._look_soon()
        else:
            self.look_around()

    def look_around(self) -> None:
        """Tell the membership what was heard, and carry out what it says."""
        members = self.members
        if members is None or self._stopping:
            return
        now, cluster = self.now, self.cluster
        if members.leads:
            members.on_beats(cluster.beats(self, members), now)
        else:
            leader = self._leader_process()
            if leader is not None:
                last = cluster.last_contact(self, leader)
                if last < self.clock.now - 0.5:
                    last -= cluster.rng.random() * members.period * (self.plan.coarseness > 1)
                members.on_contact(now - (self.clock.now - last))
                if (
                    not leader.alive
                    and cluster.network.connected(self.machine, leader.machine)
                    and not cluster.is_dark(leader.machine)
                ):
                    members.on_store_ended()
        for name in members._watching:
            other = cluster.neighbour(self, name)
            if other is not None:
                ended = (
                    not other.alive
                    and cluster.network.connected(self.machine, other.machine)
                    and not cluster.is_dark(other.machine)
                )
                last = cluster.last_contact(self, other)
                members.on_neighbour(name, None if ended else now - (self.clock.now - last))
        for action in members.check(now):
            self._carry_out_membership(action)
            if not self.alive or self.members is not members:
                return

    def _carry_out_membership(self, action: membership.Action) -> None:
        members = self.members
        assert members is not None
        if isinstance(action, membership.Stop):
            self.note(f"stops: {action.cause}")
            self._stop(FailureReport(cause=action.cause, exit_code=1), final=True)
        elif isinstance(action, membership.Ask):
            self._ask(action.nodes)
        elif isinstance(action, membership.Accuse):
            self._mail("leader", mail.Accused(action.signs))
        elif isinstance(action, membership.Agreement):
            self._mail("all", mail.Agreed(action.version))
            self.handle(mail.Agreed(action.version))
        elif isinstance(action, membership.Lost):
            self.nodes = members.nodes
            self.note(f"has lost {', '.join(action.nodes[:8])}")
            self.cluster.decisions.append(("lost", action.nodes))
            self.handle(mail.NodesLost(action.nodes, action.ended))
        elif isinstance(action, membership.Move):
            self._move(action)

    def _ask(self, names: tuple[str, ...]) -> None:
        members, cluster = self.members, self.cluster
        for name in names:
            if self.clock.now - self._asked.get(name, -9.0) < membership.SUSPECT_SECONDS:
                continue
            self._asked[name] = self.clock.now
            other = cluster.neighbour(self, name)
            if other is None:
                continue
            cluster.count(self, other, "question", 60)

            def answer(name: str = name, other: Launcher = other) -> None:
                """A machine that stands still accepts connections; one without power, or cut off, does not answer."""
                found: bool | None = other.alive
                if cluster.is_dark(other.machine) or not cluster.network.connected(self.machine, other.machine):
                    found = None
                if self.members is members and members is not None:
                    members.on_answers({name: found}, self.now)
                    self._look_soon()

            reachable = cluster.network.connected(self.machine, other.machine) and not cluster.is_dark(other.machine)
            seconds = 2 * cluster.network.one_way() if reachable else membership.SUSPECT_SECONDS
            self.clock.later(seconds, self.guard(answer))

    def _move(self, move: membership.Move) -> None:
        members = self.members
        assert members is not None
        self.note(f"has lost the leader {move.lost}; goes on with {move.leader} in term {move.term}")
        self.cluster.decisions.append(("leader", move.leader))
        leader = self if members.leads else self.cluster.neighbour(self, move.leader)
        assert leader is not None
        self.nodes, self.leader, self.leads = members.nodes, move.leader, members.leads
        self._out = []
        self.store = leader.standby
        self.store.round = max(self.store.round, self.round)
        self.cluster.launchers_by_name[self.own, self.store] = self
        if self.leads:
            self.store.room(self.round).arrivals += max(map(int, [*self.nodes, move.lost]))
        if not self._signpost:
            self._signpost = True
            self._leave_signpost()
        address = ("", self.number) if self.leads else None
        self.handle(mail.LeaderLost(move.leader, address, move.term, move.ended, move.gone, move.new))
        self.clock.later(self.cluster.brief(), self.guard(self._read_waiting))

    def _become_leader(self, term: int) -> None:
        members = self.members
        assert members is not None
        assert self.store is not None
        self.note(f"leads in term {term}")
        self.cluster.decisions.append(("leads", self.own))
        members.confirm(term)
        self._mail("all", mail.Leads(term))
        room = self.store.room(self.round)
        room.decided = {"run_id": self.run_id, "leader": self.own, "nodes": self.nodes}

    def _leave_signpost(self) -> None:
        store, members = self.cluster.endpoint_store(), self.members
        if (
            store is not None
            and store.owner is not self
            and members is not None
            and members.leaves_signpost
            and self.cluster.network.connected(self.machine, 0)
        ):
            store.moved = self.store
        self.clock.later(0.4, self.guard(self._leave_signpost))

    # --- the run ------------------------------------------------------------------------------------------------------

    def _tick_launcher(self) -> None:
        if self.node is not None and not self._stopping:
            self.handle(protocol.Tick())
            for rank in [rank for rank in self.ranks.values() if rank.key in self.node.late_here]:
                rank.exit(-9)
        self._check_over()
        self.clock.later(_LAUNCHER_SECONDS * self.plan.coarseness, self.guard(self._tick_launcher))

    def handle(self, event: protocol.Event) -> bool:
        """Let the node handle an event, and carry out what it says; return whether a loss was survived."""
        if self.node is None:
            return True
        actions = self.cluster.timed(self, event, lambda: self.node.handle(event, self.now))
        return self._carry_out(actions)

    def _carry_out(self, actions: list[protocol.Action]) -> bool:
        survived = True
        for action in actions:
            survived = survived and not isinstance(action, protocol.Unsurvived)
            self._carry_out_one(action)
        if self.alive:
            self.cluster.invariants.on_event(self)
        return survived

    def _carry_out_one(self, action: protocol.Action) -> None:
        if isinstance(action, protocol.Deliver):
            rank = self.ranks.get(action.key)
            if rank is not None:
                self.clock.later(self.cluster.brief(), self.guard(lambda: rank.on_order(action.order)))
        elif isinstance(action, protocol.Send):
            self._mail(action.to, action.message)
        elif isinstance(action, protocol.Start):
            for _ in range(action.count):
                self._start_rank(None, late=False)
        elif isinstance(action, protocol.Retire):
            self.ranks.pop(action.key, None)
        elif isinstance(action, protocol.EndHere):
            from phalanx.recovery.messages import End

            for rank in list(self.ranks.values()):
                if rank.alive:
                    self.clock.later(self.cluster.brief(), self.guard(lambda rank=rank: rank.on_order(End())))
        elif isinstance(action, protocol.Accept):
            assert self.node is not None
            assert self.members is not None
            common = {"term": self.node.view.term, "nodes": self.cluster.entries_of(self.node.view)}
            counts = (tuple(self.members.gone), tuple(self.members.new))
            self._mail(tuple(action.places), mail.TakenIn(common, action.places, *counts))
        elif isinstance(action, protocol.NodesChanged):
            if self.members is not None:
                if self.members.change(self.cluster.entries_from(action.nodes), self.now, action.version):
                    self._mail("leader", mail.Known(action.version))
                self.nodes = self.members.nodes
        elif isinstance(action, mail.Lead):
            self._become_leader(action.term)
        elif isinstance(action, protocol.Tell):
            event = action.event
            if event.get("event") == "rank_lost":
                self.cluster.decisions.append((event.get("action", ""), event.get("size", 0)))
            self.note(" ".join(str(value) for name, value in event.items() if name not in ("time", "rank_in"))[:160])
        elif isinstance(action, protocol.Later):
            self.clock.later(action.seconds, self.guard(lambda: self.handle(action.event) and None))
        elif isinstance(action, protocol.GiveUp):
            self._stop(FailureReport(cause=action.cause, exit_code=1), final=action.alone)
        elif isinstance(action, protocol.Unsurvived) and action.failure is not None:
            self._stop(FailureReport.from_message(dict(action.failure)))
        elif isinstance(action, protocol.AllOver):
            self._all_over = True
            if self.plan.coarseness > 1:  # else the launcher looks often enough
                self.clock.later(self.cluster.brief(), self.guard(self._check_over))

    def _start_rank(self, slot: int | None, *, late: bool) -> None:
        """Start a process that waits for a place; with a slot one of a machine that has just come."""
        assert self.node is not None
        self._added += 1
        used = {rank.slot for rank in self.ranks.values() if rank.alive}
        number = slot if slot is not None else next(n for n in range(100_000) if n not in used)
        key = f"n{self.number}-{self._added}"
        rank = self.ranks[key] = Rank(self, key, number, number)
        if late:
            self.node.here[key] = protocol.Rank(key, self.own, number, number, number)
        else:
            self.handle(protocol.RankStarted(key, number, number))

        def ready() -> None:
            if rank.alive and rank.group is None:
                rank.say(RankReady("new", -1))

        self.clock.later(self.cluster.rng.uniform(*self.plan.process_seconds), self.guard(ready))

    def on_rank_message(self, rank: Rank, message: Wire) -> None:
        """Pass on what a rank says."""

        def speak() -> None:
            if self.ranks.get(rank.key) is rank:  # else it is of an earlier attempt
                self.handle(protocol.RankSpoke(rank.key, message))

        self.guard(speak)()

    def on_rank_exit(self, rank: Rank, code: int) -> None:
        """Note the end of a rank's process."""
        self.guard(lambda: self._assess(rank, code))()

    def _assess(self, rank: Rank, code: int) -> None:
        rank.reaped = True
        if self.ranks.get(rank.key) is not rank or self.node is None:
            return
        if code == 0:
            self.handle(protocol.RankFinished(rank.key))
        elif not self._stopping:
            report = FailureReport(cause=f"rank {rank.slot} ended with {code}", exit_code=code if code > 0 else 1)
            if not self.handle(protocol.RankCrashed(rank.key, code, f"ended with {code}", report.to_message())):
                self._stop(report)
        self._check_over()

    def _stop(self, failure: FailureReport, *, final: bool = False, publish: bool = True) -> None:
        """End the attempt for a reason."""
        if self._stopping:
            return
        self._stopping = True
        self.note(f"ends the attempt: {failure.cause[:120]}")
        if publish and not final:
            self._mail("all", mail.RemoteFailure(failure.to_message()))
        outcome = Outcome(
            failure.exit_code, failure, final=final, failures=max(self.failures, self.node.failures if self.node else 0)
        )
        self._outcome = outcome
        self.clock.later(self.cluster.rng.uniform(0.2, 1.5), self.guard(self._end_attempt))

    def _end_attempt(self) -> None:
        outcome = self._outcome
        assert outcome is not None
        for rank in list(self.ranks.values()):
            rank.exit(-15)
        self.failures = max(self.failures, outcome.failures)
        if may_restart(outcome, failures=self.failures, max_restarts=self.plan.max_restarts):
            self.cluster.invariants.on_restart(self, outcome)
            self.attempt += 1
            self.failures += 1
            self.note(f"restart {self.failures}")
            self._gather()
            return
        self._exit(outcome.exit_code, outcome.failure.cause[:100] if outcome.failure else "")

    def _check_over(self) -> None:
        if self.node is None or self._stopping or any(not rank.reaped for rank in self.ranks.values()):
            return
        if not self._all_over:
            self.handle(protocol.AllHereEnded())
        if self._all_over and self.alive:
            self._exit_soon()

    def _exit_soon(self) -> None:
        self._stopping = True
        self.clock.later(self.cluster.brief() + (1.0 if self.leads else 0.0), self.guard(lambda: self._exit(0)))
