"""The group of a run, as the launcher that leads decides about it: lost ranks are replaced, the others stay.

    running --a rank is lost, or one is added--> leaving --all are ready--> forming --all have joined--> running

*leaving*: ranks abort the collective that they wait in, or stop at a step's boundary, and report their last step.
*forming*: each rank got its new position and joins the group of the next generation. `policy` says what follows from a
loss. Example: r0, r1 and r2 train in generation 4, and the process r1 is killed after step 17.

    launcher                                    r0                  r2                  r3
    r1 ended; policy: replace; leaving          gets Abort          gets Abort          is started in r1's slot
    all have aborted: sends Release             ready, step 17      ready, step 17      imports torch
    r3 is ready too: forming, generation 5      rank 0 of 3         rank 2 of 3         rank 1 of 3
    all have joined: running                    joined 5            joined 5            joined 5, has the state of r0

If r2 is lost before r3 is ready, the group is leaving still: both losses are one failure, and one more rank is started.
If r2 is lost while the others join generation 5, that is the next failure: r0 and r3 leave again, for generation 6. If
r0 and r2 are both lost before r3 has joined, no rank holds the state: the launcher starts all again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from phalanx.errors import EXIT_USAGE
from phalanx.host.wire import Wire
from phalanx.launch.membership import ALL
from phalanx.launch.spec import Elastic
from phalanx.observe.events import Message, RankLost
from phalanx.recovery.launcher.policy import (
    RECENT_SECONDS,
    Change,
    Decision,
    Facts,
    Sizes,
    decide,
    fails_too_often,
    patience,
    pause,
)
from phalanx.recovery.launcher.protocol import (
    Accept,
    Action,
    ArrivalsDue,
    FillDue,
    GiveUp,
    Later,
    NodesChanged,
    Rank,
    Retire,
    Send,
    Tell,
    Unsurvived,
)
from phalanx.recovery.launcher.view import GroupView
from phalanx.recovery.messages import (
    Abort,
    End,
    LeaveAtStep,
    LeftOut,
    NodeView,
    Position,
    RankAborted,
    RankInterrupted,
    RankJoined,
    RankReady,
    Release,
    StartRanks,
    Wait,
)

State = Literal["starting", "running", "leaving", "forming"]
Cause = Literal["joined", "loss", "interruption", "request", "ready"]

TRANSITIONS: Mapping[tuple[State, Cause], State] = {
    ("starting", "joined"): "running",
    ("starting", "interruption"): "leaving",
    ("running", "loss"): "leaving",
    ("running", "interruption"): "leaving",
    ("running", "request"): "leaving",
    ("leaving", "loss"): "leaving",
    ("leaving", "interruption"): "leaving",
    ("leaving", "ready"): "forming",
    ("forming", "joined"): "running",
    ("forming", "loss"): "leaving",
    ("forming", "interruption"): "leaving",
}
"""What else may happen in a state changes no state. A loss while the group starts is not survived."""
_NAMED = 16
"""How many ranks or nodes a message names."""
_ARRIVAL_SECONDS = 0.2
"""How long the leader waits for more nodes before it takes in one that has come late."""
_TRIES = 3
"""Consecutive failed starts, or interruptions without a lost rank, before giving up."""


class ElasticGroup:
    """Takes what ranks report, losses and requests, and says what to do; the actions collect in `actions`."""

    def __init__(
        self,
        elastic: Elastic,
        own: str,
        view: GroupView,
        members: Iterable[Rank],
        *,
        max_restarts: int,
        now: float,
        epoch: float = 0.0,
    ) -> None:
        """`members`: in the order of their ranks. With a generation in the view another launcher has formed them.

        `epoch`: when the clock of `now` was 0, in seconds since the epoch.
        """
        self.actions: list[Action | tuple[Rank, Wire]] = []
        """What to do, in order; a rank with an order: send it."""
        self.now = now
        self._elastic, self._own, self._view, self._max_restarts = elastic, own, view, max_restarts
        self._epoch = epoch
        self.members = list(members)
        self.ranks = {rank.key: rank for rank in self.members}
        """All processes that have reported and are not forgotten."""
        self.spares: list[Rank] = []
        self.starting: Counter[str] = Counter()
        """How many processes of each node have not reported yet that they are ready."""
        self.size = len(self.members)
        """How many ranks the next generation has."""
        self.sizes = Sizes(elastic.sizes)
        self.state: State = "running" if view.generation else "starting"
        self.since = now
        self.change: Change | None = None
        self._unreported: Change | None = None
        """Why the present generation was formed, as long as no rank is known to have reported it."""
        self.steps: dict[str, int] = {}
        """The last step of each process that is ready for the next generation."""
        self.address: tuple[str, int] | None = None
        """Where the ranks' store is, if it has moved."""
        self._keys = {rank.key for rank in self.members}
        self._finished = {rank.key for rank in self.members if not rank.alive}
        self._unjoined = set(self._keys) if not view.generation else set[str]()
        """Members that have not joined the present group yet; these sets shrink rank by rank, of perhaps 100,000."""
        self._unready, self._unaborted = set[str](), set[str]()
        """Members that have not left the last group yet, and those of them that have not aborted either."""
        self._holders = set(self.ranks) if view.generation else set()
        """Ranks that were in the last group, and so hold the state of the run."""
        self._losses = defaultdict[str, list[float]](
            list, {name: [now] * node.losses for name, node in view.nodes.items()}
        )
        self._failed_starts = self._without_step = 0
        self._last_step = -1
        self._said_short = False
        self._arrived: dict[str, NodeView] = {}
        """Nodes that have come late and are not taken in yet."""
        self._agree_on = 0
        """The version of the view that enough nodes have to know before a group forms; 0: there is none.

        A node that is only cut off may go on without this one, and would not know that it is left out.
        """

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The number of the present group."""
        return self._view.generation

    @property
    def failures(self) -> int:
        """How many failures the run has had."""
        return self._view.failures

    @property
    def present(self) -> int:
        """All processes, also those that are only starting."""
        return len(self.members) + len(self.spares) + sum(self.starting.values())

    @property
    def missing(self) -> int:
        """How many more ranks the next generation has."""
        return self.size - len(self.members)

    @property
    def able(self) -> list[Rank]:
        """Spare ranks that are ready to take a place."""
        return [rank for rank in self.spares if rank.key in self.steps]

    @property
    def is_ready(self) -> bool:
        """Whether all ranks have left the last group, and there are enough for the next one."""
        left = self.state == "leaving" and not self._unready
        return left and self.missing <= len(self.able) and not self._agree_on

    @property
    def is_settled(self) -> bool:
        """Whether the ranks train, and none is being added."""
        return self.state == "running" and self.change is None

    @property
    def unchanged_since(self) -> float:
        """When the ranks began to train in this group, by the monotonic clock; infinity while it changes."""
        return self.since if self.is_settled else math.inf

    @property
    def spares_only(self) -> bool:
        """Whether all ranks have ended, and only spare ranks are left."""
        return len(self._finished) == len(self._keys)

    def late(self) -> list[Rank]:
        """Return ranks that have not left or joined for long; those of them that make no progress are to be killed."""
        if self.now - self.since <= patience(self._elastic.silence_seconds):
            return []
        if self.state not in ("leaving", "forming") or (self.change and self.change.requested):
            return []
        late = self._unready if self.state == "leaving" else self._unjoined
        if self.state == "leaving" and self._unaborted:  # those who have wait for the others, to be released
            late = self._unaborted
        return [member for member in self.members if member.key in late]

    @property
    def _leaves_at_step(self) -> bool:
        return self.state == "leaving" and self.change is not None and self.change.requested

    # --- what ranks report --------------------------------------------------------------------------------------------

    def on_message(self, rank: Rank, message: Any) -> None:
        """Note a message of a rank: it has joined its group, was interrupted, has aborted, or is ready for the next."""
        self.ranks.setdefault(rank.key, rank)
        if not rank.alive or rank.dismissed:  # it was lost after it had sent this
            return
        is_news = self.state != "leaving" or (isinstance(message, RankInterrupted) and self._leaves_at_step)
        if isinstance(message, (RankReady, RankInterrupted)) and rank.key in self._keys and is_news:
            self._leave("interruption", f"rank {rank.rank} was interrupted: {message.why[:200]}")
        if isinstance(message, RankJoined):
            self._on_joined(rank, message)
        elif isinstance(message, RankAborted):
            self._on_aborted(rank)
        elif isinstance(message, RankReady):
            self._on_ready(rank, message)

    def _on_joined(self, rank: Rank, message: RankJoined) -> None:
        if message.generation != self.generation:
            return
        self.sizes.fix(self.size, message.fixed)
        self._unjoined.discard(rank.key)
        self._holders.add(rank.key)
        waits = self.state in ("starting", "forming")  # else one that has joined was lost meanwhile
        if waits and not self._unjoined:
            self._enter("joined")
            self._failed_starts = 0
            self.fill()
            self._grow("more ranks are there")

    def _on_aborted(self, rank: Rank) -> None:
        """Let ranks end nccl's collectives once all have aborted: none of them uses what those leave then."""
        if self.state != "leaving":  # its group has been left since
            return
        self._unaborted.discard(rank.key)
        if not self._unaborted:
            for member in self.members:
                self._order(member, Release())

    def _on_ready(self, rank: Rank, message: RankReady) -> None:
        self.steps[rank.key] = message.step
        if message.reported:
            self._unreported = None
        self._unready.discard(rank.key)
        self._unaborted.discard(rank.key)
        if rank.key not in self._keys and rank not in self.spares:
            self.spares.append(rank)
            self.starting -= Counter([rank.node])  # not below zero
            if self.spares_only:  # the others have finished meanwhile
                self._order(rank, End())
                return
        self._check_ended()
        self._form_if_ready()

    def on_end(self, rank: Rank) -> None:
        """Note a rank that has finished: the group does not change any more."""
        rank.code = 0
        if self.state == "running" and self.change is not None and rank.key in self._keys:
            self._drop_request()
        if rank.key in self._keys:
            self._finished.add(rank.key)
            if not self.spares_only:
                self._check_ended()

    def _check_ended(self) -> None:
        """Give up if ranks wait, or left because of an error, and others have ended: these do not come back."""
        change = self.change
        if not self._finished or self.state != "leaving" or change is None:
            return
        if not change.requested or len(self._unready) < len(self._keys):
            ended = [member.rank for member in self.members if member.key in self._finished]
            self._give_up(f"{'; '.join(change.reasons)}, and rank {ended[0]} has finished already")

    # --- losses -------------------------------------------------------------------------------------------------------

    def on_loss(self, rank: Rank, how: str, failure: Mapping[str, Any] | None) -> None:
        """Note a rank that was lost. A node, of several, that fails far more often than the others is left out.

        `how`: the end of a sentence that begins with "rank 3". `failure`: the report, if it was of another node.
        """
        nodes = self._view.nodes
        self._losses[rank.node].append(self.now)
        recent = {name: sum(self.now - at < RECENT_SECONDS for at in self._losses[name]) for name in nodes}
        losses = recent.pop(rank.node, 0)
        if rank.node in nodes:
            self._change_view({rank.node: replace(nodes[rank.node], losses=losses)})
        if rank.node not in (self._own, "") and rank.node in nodes and fails_too_often(losses, list(recent.values())):
            host = nodes[rank.node].host
            self._send(rank.node, LeftOut(f"{losses} ranks of {host} have failed, far more than elsewhere"))
            self._change_view(self._view.without([rank.node]))
            self.starting.pop(rank.node, None)
            lost = [member for member in self.members if member.node == rank.node]
            how = f"{how}; its node {host} has failed {losses} times and is left out"
            survived = self.lose(lost, how, replaceable=False)
        else:
            survived = self.lose([rank], how)
        if not survived:
            self.actions.append(Unsurvived(failure))

    def on_nodes_lost(self, names: Iterable[str], ended: Collection[str] = ()) -> None:
        """Note nodes that were lost with all their ranks; `ended`: those that cannot go on without the others."""
        hosts = {name: self._view.nodes[name].host for name in names if name in self._view.nodes}
        if hosts:
            self._change_view(self._view.without(hosts))
        for name in sorted(hosts.keys() - set(ended)):
            self._agree_on = self._view.version
            self._send(name, LeftOut("it did not answer, and the others have gone on"))  # should it run still
        starting = [self.starting.pop(node, 0) for node in hosts]
        if any(starting):
            self.actions.append(Later(0.0, FillDue()))
        waiting = [rank for rank in self.spares if rank.node in hosts]
        lost = [rank for rank in self.members if rank.node in hosts]
        names = _some(sorted(set(hosts.values())))
        how = f"was lost with its node {names}" if len(hosts) == 1 else f"was lost with one of {names}"
        if (lost or waiting) and not self.lose([*waiting, *lost], how, replaceable=False):
            ranks = f"rank{'s' * (len(lost) > 1)} {_some([str(rank.rank) for rank in lost])}"
            self._give_up(
                f"the node {names} was lost with {ranks}"
                if len(hosts) == 1
                else f"the nodes {names} were lost with {ranks}"
            )

    def on_agreed(self, version: int) -> None:
        """Note that enough nodes know a version of the view."""
        if version >= self._agree_on:
            self._agree_on = 0
            self._form_if_ready()

    def lose(self, ended: Sequence[Rank], how: str, *, replaceable: bool = True) -> bool:
        """Note ranks that were lost together; return whether the run goes on without a restart.

        `replaceable`: not if a node was lost.
        """
        for rank in ended:
            if self.steps.pop(rank.key, None) is not None and rank.key in self._keys:
                self._unready.add(rank.key)  # it stays a member if the run does not go on
            rank.code = -1 if rank.code is None else rank.code
        lost = [rank for rank in ended if rank.key in self._keys]
        fails = [not self._lose_new(rank, how) for rank in ended if rank.key not in self._keys]
        if not lost:
            self.actions.append(Later(pause(self._failed_starts), FillDue()))
            return not any(fails)
        if self.state == "starting":
            return False
        decision = decide(self._facts(lost, replaceable))
        if decision.kind == "give_up":
            self._say(f"rank {lost[0].rank} {how}; no recovery in place: {decision.why}")
            return False
        self._change_view({}, failures=self._count())
        for rank in lost:
            self._retire(rank)
        self._execute(decision, lost, how)
        return True

    def _count(self) -> int:
        """Return the number of failures with the present one: ranks that are lost together are one."""
        together = self.state == "leaving" and self.change is not None and bool(self.change.lost)
        return self.failures + (not together)

    def _lose_new(self, rank: Rank, how: str) -> bool:
        """Note the loss of a rank that was not in the group yet; return False if the others cannot go on."""
        if rank in self.spares:
            self.spares.remove(rank)
        else:
            self.starting -= Counter([rank.node])  # not below zero
            self._failed_starts += 1
        hopeless = self._failed_starts > _TRIES or rank.code == EXIT_USAGE
        if hopeless and self.state != "running":
            return False  # it is not forgotten: its error is the cause
        self._retire(rank)
        if hopeless and self.change is not None:
            self._say(f"no ranks were added: a new one {how}")
            self._drop_request()
        return True

    def _facts(self, lost: list[Rank], replaceable: bool) -> Facts:
        keys = {rank.key for rank in lost}
        remaining = [rank for rank in self.members if rank.key not in keys]
        return Facts(
            lost=[rank.code or 0 for rank in lost],
            present=sum(rank.key in self._holders and rank.alive for rank in remaining),
            spares=len(self.spares),
            size=self.size,
            sizes=self.sizes.allowed,
            ended=sum(not rank.alive for rank in remaining),
            failures=self._count(),
            max_restarts=self._max_restarts,
            without_progress=self._without_step,
            missing=len(lost),
            replaceable=replaceable,
        )

    def _execute(self, decision: Decision, lost: list[Rank], how: str) -> None:
        keys = {rank.key for rank in lost}
        self.members = [rank for rank in self.members if rank.key not in keys]
        for awaited in (self._keys, self._finished, self._unjoined, self._unready, self._unaborted):
            awaited -= keys
        for rank in lost:
            self.actions.append(Tell(RankLost(rank.rank, how, decision.kind, decision.size, decision.why).to_dict()))
        self.size = decision.size
        ranks = _some([f"rank {rank.rank}" for rank in lost])
        self._leave("loss", f"{ranks} {how}", [rank.rank for rank in lost])
        self.actions.append(Later(decision.pause, FillDue()))

    # --- starting processes -------------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Start what is missing after a loss; if it was one of several nodes that came together, use the others."""
        self.fill()
        self._grow("more ranks are there")

    def fill(self) -> None:
        """Start what is missing; spare ranks, which have loaded everything already, come first."""
        if self.state == "starting":
            return
        wanted = self.size + (self._elastic.spares if self.state == "running" else 0)
        if (missing := wanted - self.present) > 0 and self._failed_starts <= _TRIES:
            self._start(missing)
            if self.present >= self.size and (short := wanted - self.present) > 0 and not self._said_short:
                self._said_short = True
                self._say(f"{short} of {self._elastic.spares} spare ranks are missing: no node has room for more")
        if self.present < self.size:
            self._do_with_less()
        self._form_if_ready()

    def _start(self, count: int) -> None:
        """Start processes on nodes that have room: those that have lost some."""
        living = Counter(rank.node for rank in self.ranks.values() if rank.alive and not rank.dismissed) + self.starting
        for name, node in self._view.nodes.items():
            room = min(count, node.slots - living[name])
            if room > 0:
                count -= room
                self.starting[name] += room
                self._send(name, StartRanks(room, self.generation + 1))

    def _do_with_less(self) -> None:
        """Choose a smaller number of ranks: no node has room for more processes."""
        if self.state == "running":
            self._drop_request()
            return
        self.size = self.sizes.below(self.present)
        if not self.size:
            self._give_up(f"{self.present} ranks are left: fewer than the run may have")

    # --- another number of ranks --------------------------------------------------------------------------------------

    def resize(self, size: int, why: str) -> str | None:
        """Change the number of ranks at a step's boundary; return why that is not possible, if so."""
        if refused := self.sizes.refusal(size):
            return refused
        if self._finished:
            return "the run is about to end."
        self.sizes.most = size
        if size == len(self.members):
            return None
        self._request(size, why)
        if size < len(self.members):
            self._leave_at_a_step()
            return None
        self._failed_starts = 0
        self.fill()  # new ranks get ready while the others train
        return None if self.size == size else f"no node has room for {size} ranks."

    def on_arrival(self, name: str, node: NodeView) -> None:
        """Note a node that has come late; those that come within a moment are taken in together."""
        if not self._arrived:
            self.actions.append(Later(_ARRIVAL_SECONDS, ArrivalsDue()))
        self._arrived[name] = node

    def take_in(self) -> None:
        """Take in the ranks of nodes that have come late, as many as the run can use: they get ready meanwhile.

        The view changes once for all of them, and each other node gets one message for a rack instead of 64.
        """
        came, self._arrived = self._arrived, {}
        if not came:
            return
        first = max((rank.slot for rank in (*self.ranks.values(), *self.members)), default=-1) + 1
        common: dict[str, Any] = {"num_nodes": len(self._view.nodes) + len(came), "late": True}
        common["world_size"] = self._view.size
        if self.address is not None:
            common |= {"master_addr": self.address[0], "master_port": self.address[1]}
        places: dict[str, dict[str, Any]] = {}
        for name, node in came.items():
            places[name] = {**common, "node_rank": len(self._view.nodes) + len(places), "first_rank": first}
            first += node.slots
        change = self._view.change(came, generation=self.generation, failures=self.failures)
        self.actions.append(NodesChanged(came, change.version))
        self.actions.append(Accept(places))
        self._send(tuple(came), self._view.whole())  # first: a change says nothing to a node that knows no view
        self._send(ALL, change)
        self.starting.update({name: node.slots for name, node in came.items()})
        hosts = _some([node.host for node in came.values()])
        self._grow(f"the node{'s' * (len(came) > 1)} {hosts} arrived")

    def _grow(self, why: str) -> None:
        """Let ranks that are there, or get ready, take part as far as the run can use them."""
        most = self.sizes.below(min(self.sizes.most, self.present - self._elastic.spares))
        if most > len(self.members) and self.is_settled and not self._finished:
            self._request(most, why)
            self._form_if_ready()

    def _request(self, size: int, why: str) -> None:
        """Note that the group is to have another number of ranks, when those are ready."""
        self.size, self.change = size, Change(self.now, [why], requested=True)

    def _drop_request(self) -> None:
        """Keep the number of ranks after all."""
        self.size, self.change = len(self.members), None

    # --- transitions --------------------------------------------------------------------------------------------------

    def _enter(self, cause: Cause) -> None:
        self.state, self.since = TRANSITIONS[self.state, cause], self.now

    def _leave(self, cause: Cause, why: str, lost: Sequence[int] = ()) -> None:
        """Let all ranks leave what they wait in."""
        change = self.change = self.change or Change(self.now)
        if lost and not change.lost:
            change.reasons.clear()  # what ranks noticed before the loss was known
        change.reasons.append(why)
        change.lost += lost
        if self.state != "leaving":
            self._forget_steps()
        if self.state != "leaving" or change.requested or lost:  # ranks have time from now on
            self._enter(cause)
        change.requested = False
        self._unaborted = set(self._unready)
        for member in self.members:
            if member.key not in self.steps:
                self._order(member, Abort(why))
        self._check_ended()

    def _leave_at_a_step(self) -> None:
        """Let all ranks leave at a step's boundary, for a change that was requested."""
        assert self.change is not None, "a request is a change"
        self._enter("request")
        self._forget_steps()
        for member in self.members:
            self._order(member, LeaveAtStep(self.change.reasons[-1]))

    def _forget_steps(self) -> None:
        self.steps = {key: step for key, step in self.steps.items() if key not in self._keys}
        self._unready, self._unaborted = set(self._keys), set(self._keys)

    def _form_if_ready(self) -> None:
        if self.state == "running" and self.change is not None and 0 < self.missing <= len(self.able):
            self._leave_at_a_step()  # those who were added are ready
        if not self.is_ready:
            return
        step = max((self.steps[member.key] for member in self.members), default=-1)
        self._without_step = self._without_step + 1 if step <= self._last_step else 0
        self._last_step = max(step, self._last_step)
        change = self.change
        if change is not None and not change.lost and not change.requested and self._without_step > _TRIES:
            self._give_up(f"{'; '.join(change.reasons)}; no step was complete since the last {_TRIES} interruptions")
            return
        self._form()

    def _form(self) -> None:
        """Begin the next generation: each chosen rank gets its position."""
        chosen = self._choose([*self.members, *self.able])
        self._set_aside(chosen)
        self._enter("ready")
        change = self._unreported = (self.change or Change(self.now)).after(self._unreported)
        self.change = None
        grouped = defaultdict[str, list[Rank]](list)
        for rank in chosen:
            grouped[rank.node].append(rank)
        nodes = {node: _numbered(grouped[node]) for node in sorted(grouped)}
        order = {node: number for number, node in enumerate(nodes)}
        self.members = [rank for ranks in nodes.values() for rank in ranks]
        self._keys = {rank.key for rank in self.members}
        self._unjoined, self._finished = set(self._keys), set()
        counts = {node: len(ranks) for node, ranks in nodes.items()}
        self._change_view(self._view.with_ranks(counts), generation=self.generation + 1)
        address, port = self.address or ("", 0)
        for number, rank in enumerate(self.members):
            self.steps.pop(rank.key, None)
            rank.rank, rank.local_rank = number, nodes[rank.node].index(rank)
            position = Position(
                rank=number,
                local_rank=rank.local_rank,
                world_size=self.size,
                local_world_size=counts[rank.node],
                node_rank=order[rank.node],
                generation=self.generation,
                term=self._view.term,
                failures=self.failures,
                began=self._epoch + change.began,
                reason="; ".join(change.reasons),
                lost=tuple(change.lost),
                master_addr=address,
                master_port=port,
            )
            self._order(rank, position)

    def _choose(self, able: list[Rank]) -> list[Rank]:
        """Return the ranks of the next group: if not all have a place, first those that hold the last step."""
        last = max(self.steps[rank.key] for rank in able)
        by_step = sorted(able, key=lambda rank: self.steps[rank.key] < last)
        keys = {rank.key for rank in by_step[: self.size]}
        return [rank for rank in able if rank.key in keys]

    def _set_aside(self, chosen: list[Rank]) -> None:
        """Let ranks without a place wait, as far as the run may use them; the others end, and free their memory."""
        self._holders &= self._keys
        keys = {rank.key for rank in chosen}
        waiting = [rank for rank in self.spares + self.members if rank.key not in keys]
        kept = max(self._elastic.spares, self.sizes.most - self.size)
        self.spares = waiting[:kept]
        for rank in waiting[:kept]:
            rank.dismissed = False
            self._order(rank, Wait())
        for rank in waiting[kept:]:
            rank.dismissed = True
            self._order(rank, End())

    # --- actions ------------------------------------------------------------------------------------------------------

    def _order(self, rank: Rank, order: Wire) -> None:
        self.actions.append((rank, order))

    def _send(self, to: str | tuple[str, ...], message: Wire) -> None:
        self.actions.append(Send(to, message))

    def _retire(self, rank: Rank) -> None:
        self.ranks.pop(rank.key, None)
        if rank.node == self._own:
            self.actions.append(Retire(rank.key))

    def _say(self, text: str) -> None:
        self.actions.append(Tell(Message("warning", text).to_dict()))

    def _give_up(self, cause: str) -> None:
        self.actions.append(GiveUp(cause))

    def _change_view(
        self, nodes: Mapping[str, NodeView | None], *, generation: int | None = None, failures: int | None = None
    ) -> None:
        view = self._view
        known = set(view.nodes)
        change = view.change(
            nodes,
            generation=view.generation if generation is None else generation,
            failures=view.failures if failures is None else failures,
        )
        self._send(ALL, change)
        came_or_went = {name: node for name, node in nodes.items() if (node is None) == (name in known)}
        if came_or_went:
            self.actions.append(NodesChanged(came_or_went, change.version))


def _some(names: list[str]) -> str:
    """Return names as text, the first of them if they are many."""
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join(names[:_NAMED] + more)


def _numbered(ranks: list[Rank]) -> list[Rank]:
    """Return a node's ranks in their new order: each keeps its number if possible, for its device's sake."""
    kept = {rank.local_rank: rank for rank in ranks if rank.local_rank < len(ranks)}
    rest = iter([rank for rank in ranks if kept.get(rank.local_rank) is not rank])
    return [kept[number] if number in kept else next(rest) for number in range(len(ranks))]
