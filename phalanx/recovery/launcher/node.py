"""A node's launcher among the others: it leads, follows, or takes over after the node that led was lost.

It knows its own ranks, and the view of the group that all share. If it leads, its `ElasticGroup` decides about the
ranks of all nodes; else it reports what its ranks say, and carries out orders. `handle` takes an event and returns
actions.

    follow --the leader was lost, this node is the next--> take over --all have reported, or time is up--> lead
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, assert_never

from phalanx.host.wire import Wire
from phalanx.launch.agent_messages import Agreed, Lead, LeaderLost, Mailed, NodeArrived, NodesLost
from phalanx.launch.membership import ALL, election_seconds, may_continue
from phalanx.launch.spec import Elastic
from phalanx.recovery.launcher.group import ElasticGroup
from phalanx.recovery.launcher.protocol import (
    Action,
    AllHereEnded,
    AllOver,
    AnswerRequest,
    ArrivalsDue,
    Deliver,
    EndHere,
    Event,
    FillDue,
    GiveUp,
    NodesChanged,
    Rank,
    RankCrashed,
    RankFinished,
    RankSpoke,
    RankStarted,
    Resized,
    Retire,
    Send,
    Start,
    Tick,
)
from phalanx.recovery.launcher.view import GroupView, came_or_went
from phalanx.recovery.messages import (
    CommonPosition,
    End,
    FinishedRank,
    FromRank,
    Hello,
    LateRank,
    LeftOut,
    LostRank,
    NodeEnded,
    NodeView,
    Orders,
    Place,
    Position,
    RankFacts,
    RankReady,
    ResizeAnswer,
    ResizeAsked,
    RunOver,
    StartRanks,
    ViewChange,
    Wait,
)

_KNOWN_CHANGES = 4
"""How many changes of the view a node reports to a leader that takes over."""


_ORDERS = (CommonPosition, Orders, StartRanks, LateRank, LeftOut, ResizeAnswer, RunOver, ViewChange)
"""What the node that leads sends to the others: of any other one it is not obeyed."""


class Node:
    """One launcher of an elastic run."""

    def __init__(
        self,
        own: str,
        view: GroupView,
        elastic: Elastic,
        ranks: Iterable[Rank],
        *,
        max_restarts: int,
        now: float,
        epoch: float = 0.0,
        late: bool = False,
    ) -> None:
        """`ranks`: of this node. `late`: whether it came when the others had begun. `epoch`: as in `ElasticGroup`."""
        self.own, self.view = own, view
        self.now = now
        self._elastic, self._max_restarts, self._epoch = elastic, max_restarts, epoch
        self.here = {rank.key: rank for rank in ranks}
        self.group: ElasticGroup | None = self._first_group() if view.leader == own else None
        self._ready: dict[str, RankReady] = {}
        """What those ranks of this node have reported that wait for a place."""
        self._members = set() if late else set(self.here)
        """The ranks of this node that are in the present group."""
        self._formed_at = now
        self._common_position: Position | None = None
        """What the positions of all ranks in the next group have in common."""
        self._late: set[str] = set()
        self._ended: set[str] = set()
        """Nodes whose ranks have all ended."""
        self._has_said_end = False
        self._requests: list[tuple[str, int]] = []
        """Nodes that have passed on a user's request, and the numbers of ranks."""
        self._takeover: _Takeover | None = None
        self._early: dict[str, Hello] = {}
        """Reports of nodes that knew earlier than this one that it takes over."""
        self._actions: list[Action] = []

    def _first_group(self) -> ElasticGroup:
        members = []
        keys = {rank.rank: rank for rank in self.here.values()}
        for name, ranks in self.view.ranks_by_node().items():
            for local_rank, rank in enumerate(ranks):
                here = keys[rank] if name == self.own else None
                members.append(here or Rank(f"r{rank}", name, rank, rank, local_rank))
        return self._group(members)

    def _group(self, members: Iterable[Rank]) -> ElasticGroup:
        facts: Any = {"max_restarts": self._max_restarts, "now": self.now, "epoch": self._epoch}
        return ElasticGroup(self._elastic, self.own, self.view, members, **facts)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in what has happened; return what to do about it."""
        self.now = now
        if self.group is not None:
            self.group.now = now
        self._take(event)
        self._collect()
        actions, self._actions = self._actions, []
        return actions

    def _take(self, event: Event) -> None:
        group = self.group
        match event:
            case RankSpoke():
                self._on_spoke(event)
            case RankStarted(key, slot, local_rank):
                self.here[key] = Rank(key, self.own, slot, slot, local_rank)
            case RankCrashed():
                self._on_crashed(event)
            case RankFinished():
                self._on_finished(event)
            case AllHereEnded():
                self._on_all_here_ended()
            case Mailed(sender, message):
                self._on_mail(sender, message)
            case NodesLost():
                self._on_nodes_lost(event)
            case LeaderLost():
                self._on_leader_lost(event)
            case Resized(ranks):
                self._on_resized(ranks)
            case Tick():
                self._on_tick()
            case NodeArrived(name, host, slots, standby) if group is not None:
                group.on_arrival(name, NodeView(host, slots, standby))
            case ArrivalsDue() if group is not None:
                group.take_in()
            case FillDue() if group is not None:
                group.refill()
            case Agreed(version) if group is not None:
                group.on_agreed(version)
            case NodeArrived() | ArrivalsDue() | FillDue() | Agreed():
                pass  # the node that leads decides
            case _:
                assert_never(event)

    def _collect(self) -> None:
        """Add what the group has decided: orders to the ranks of one node go in one message."""
        if self.group is None or not self.group.actions:
            return
        orders: defaultdict[str, list[tuple[str, Wire]]] = defaultdict(list)
        while self.group is not None and self.group.actions:
            decided, self.group.actions = self.group.actions, []
            for action in decided:
                if isinstance(action, tuple):
                    rank, order = action
                    orders[rank.node].append((rank.key, order))
                elif isinstance(action, Send) and action.to == self.own:
                    self._read(self.own, action.message)
                else:
                    self._note(action)
                    self._actions.append(action)
        positions = (order for of_node in orders.values() for _, order in of_node if isinstance(order, Position))
        if (position := next(positions, None)) is not None:
            self._send(ALL, CommonPosition(position))
        for node, of_node in orders.items():
            if node == self.own:
                self._pass_on(Orders(tuple(of_node)))
            elif node in self.view.nodes:
                self._send(node, Orders(tuple((key, _place(order)) for key, order in of_node)))

    def _note(self, action: Action) -> None:
        if isinstance(action, Retire):
            self.here.pop(action.key, None)
        elif isinstance(action, Send) and isinstance(action.message, StartRanks):
            self._ended -= {action.to}

    def _send(self, to: str | tuple[str, ...], message: Wire) -> None:
        self._actions.append(Send(to, message))

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this node decides about the ranks of all nodes."""
        return self.group is not None

    @property
    def failures(self) -> int:
        """How many failures the run has had."""
        return self.view.failures

    @property
    def takes_requests(self) -> bool:
        """Whether a request for another number of ranks can be carried out now, or passed on."""
        return self._takeover is None and (self.group is None or self.group.is_settled)

    @property
    def unchanged_since(self) -> float:
        """When the ranks began to train in this group; infinity while it changes."""
        if self.group is not None:
            return self.group.unchanged_since
        return math.inf if self._members & self._ready.keys() else self._formed_at

    @property
    def members_here(self) -> set[str]:
        """The ranks of this node that train."""
        if self.group is None:
            return self._members
        return {rank.key for rank in self.group.members if rank.node == self.own}

    @property
    def late_here(self) -> set[str]:
        """Ranks of this node that neither leave nor join: those without progress are to be killed."""
        if self.group is None:
            return self._late
        return {rank.key for rank in self.group.late() if rank.node == self.own}

    # --- ranks of this node -------------------------------------------------------------------------------------------

    def _on_spoke(self, event: RankSpoke) -> None:
        rank = self.here.get(event.key)
        if rank is None:  # retired since
            return
        self._late.discard(event.key)  # it has left or joined
        if isinstance(event.message, RankReady):
            self._ready[event.key] = event.message
        if self.group is not None:
            self.group.on_message(rank, event.message)
        else:
            self._report(FromRank(rank.key, rank.slot, rank.local_rank, event.message))

    def _report(self, message: Wire) -> None:
        """Send a message to the node that leads; while this one takes over it has all that its ranks say."""
        if self._takeover is None:
            self._send(self.view.leader, message)

    def _on_crashed(self, event: RankCrashed) -> None:
        rank = self.here.get(event.key)
        if rank is None:
            return
        rank.code = event.code
        self._ready.pop(event.key, None)
        if self.group is not None:
            self.group.on_loss(rank, event.how, None)
            return
        del self.here[event.key]
        self._members.discard(event.key)
        self._actions.append(Retire(event.key))
        self._report(LostRank(event.key, event.code, event.how, event.failure))

    def _on_finished(self, event: RankFinished) -> None:
        rank = self.here.get(event.key)
        if rank is None:
            return
        rank.code = 0
        if self.group is not None:
            self._on_end(rank)
        else:
            self._report(FinishedRank(event.key))

    def _on_end(self, rank: Rank) -> None:
        assert self.group is not None, "it decides"
        self.group.on_end(rank)
        if self.group.spares_only:
            self._end_all()

    def _end_all(self) -> None:
        """Let ranks end that wait for a place or are only starting: there will be none."""
        assert self.group is not None, "it decides"
        members = () if self.group.spares_only else self.group.members  # all of these have ended
        for rank in (*self.group.spares, *members):
            if rank.alive:
                self.group.actions.append((rank, End()))
        self._actions.append(EndHere())

    def end(self, now: float) -> list[Action]:
        """Let ranks end that wait for a place: the attempt is over."""
        self.now = now
        if self.group is not None:
            self._end_all()
        else:
            self._actions += [Deliver(key, End()) for key in self._ready]
        self._collect()
        actions, self._actions = self._actions, []
        return actions

    def _on_all_here_ended(self) -> None:
        if self.group is None:
            if not self._has_said_end:
                self._has_said_end = True
                self._report(NodeEnded())
        elif all(name in self._ended for name in self.view.nodes if name != self.own):
            for name in self.view.nodes:
                if name != self.own:
                    self._send(name, RunOver())
            self._actions.append(AllOver())

    def _on_resized(self, ranks: int) -> None:
        if self.group is None:
            self._report(ResizeAsked(ranks))
            return
        self._actions.append(AnswerRequest(self._resize(self.group, ranks)))

    def _resize(self, group: ElasticGroup, ranks: int) -> str | None:
        return group.resize(ranks, f"a request for {ranks} rank{'s' * (ranks != 1)}")

    def _on_tick(self) -> None:
        if self._takeover is not None and self.now > self._takeover.deadline:
            self._lead_or_stop(self._takeover)
        self._lead_if_complete()
        if self.group is None:
            return
        for rank in self.group.late():
            if rank.node != self.own:
                self._send(rank.node, LateRank(rank.key))
        while self._requests and self.group.is_settled:
            node, ranks = self._requests.pop(0)
            self._send(node, ResizeAnswer(self._resize(self.group, ranks)))

    # --- other nodes --------------------------------------------------------------------------------------------------

    def _on_mail(self, sender: str, message: Wire) -> None:
        if sender == self.own:  # what goes to all comes back
            return
        if self.group is not None and sender not in self.view.nodes and not isinstance(message, Hello):
            self._send(sender, LeftOut("it was lost, and the others have gone on"))
            return
        self._read(sender, message)

    def _read(self, sender: str, message: Wire) -> None:
        if isinstance(message, Hello):
            self._on_hello(sender, message)
        elif isinstance(message, _ORDERS):
            if sender in (self.own, self.view.leader):  # else of one that led before
                self._obey(message)
        elif self._takeover is not None:
            self._takeover.waiting.append((sender, message))
        else:
            self._hear(sender, message)

    def _hear(self, sender: str, report: Wire) -> None:
        """Take what another node reports; about its ranks only if this one leads."""
        group = self.group
        match report:
            case FromRank(key, slot, local_rank, message) if group is not None:
                group.on_message(group.ranks.get(key) or Rank(key, sender, slot, slot, local_rank), message)
            case LostRank(key, code, how, failure) if group is not None:
                # A rank that is not known is a new one, which has not reported yet.
                rank = group.ranks.get(key) or Rank(key, sender, -1, -1)
                rank.code = code
                group.on_loss(rank, how, failure)
            case FinishedRank(key) if group is not None and key in group.ranks:
                group.ranks[key].code = 0
                self._on_end(group.ranks[key])
            case NodeEnded():
                self._ended.add(sender)
            case ResizeAsked(ranks):
                self._requests.append((sender, ranks))  # carried out when the group has settled
            case FromRank() | LostRank() | FinishedRank():
                pass  # the node that leads decides
            case _:
                raise AssertionError(f"{sender} reports {report}, which no node does")

    def _obey(self, order: Wire) -> None:
        """Do what the node that leads says."""
        match order:
            case Orders():
                self._pass_on(order)
            case CommonPosition(position):
                self._common_position = position
            case StartRanks(count, generation):
                self._has_said_end = False
                self._ended.discard(self.own)
                self._actions.append(Start(count, generation))
            case LateRank(key):
                self._late.add(key)
            case LeftOut(why):
                self._actions.append(GiveUp(f"this node is left out of the run: {why}", alone=True))
            case ResizeAnswer(refused):
                self._actions.append(AnswerRequest(refused))
            case RunOver():
                self._actions.append(AllOver())
            case ViewChange():
                self._on_view_change(order)
            case _:
                raise AssertionError(f"the node that leads orders {order}, which is no order")

    def _pass_on(self, orders: Orders) -> None:
        """Let ranks of this node have their orders, and note what becomes of them."""
        for key, order in orders.orders:
            if isinstance(order, Place):
                assert self._common_position is not None, "it comes first"
                order = dataclasses.replace(self._common_position, **vars(order))
            rank = self.here.get(key)
            if rank is not None and isinstance(order, Position):
                self._ready.pop(key, None)
                self._members.add(key)
                self._formed_at = self.now
                rank.rank, rank.local_rank = order.rank, order.local_rank
            elif rank is not None and isinstance(order, (End, Wait)):
                self._members.discard(key)
            self._actions.append(Deliver(key, order))

    def _on_view_change(self, message: ViewChange) -> None:
        before = self.view.nodes
        if self.view.apply(message):
            changes = came_or_went(before, self.view.nodes, message)
            if changes or message.whole:  # a node that has come late says what it knows, too: its word counts
                self._actions.append(NodesChanged(changes, message.version))

    def _on_nodes_lost(self, event: NodesLost) -> None:
        if self.group is not None:
            self._ended -= set(event.names)
            self.group.on_nodes_lost(event.names, event.ended)
        elif self._takeover is not None:
            self._takeover.missing -= set(event.names)
            self._takeover.ended |= set(event.ended)
            for name in event.names:  # what it has reported does not count any more
                self._takeover.reports.pop(name, None)
            self._lead_if_complete()

    # --- another leader -----------------------------------------------------------------------------------------------

    def _facts(self) -> tuple[RankFacts, ...]:
        return tuple(
            RankFacts(
                key=rank.key,
                slot=rank.slot,
                rank=rank.rank,
                local_rank=rank.local_rank,
                code=rank.code,
                is_member=rank.key in self._members,
                ready=self._ready.get(rank.key),
            )
            for rank in self.here.values()
        )

    def _on_leader_lost(self, event: LeaderLost) -> None:
        if self.group is not None:
            return
        lost, self.view.leader, self.view.term = self.view.leader, event.leader, event.term
        if event.address is not None:
            ended = set(event.ended)
            missing = self.view.nodes.keys() - {self.own, lost, *ended, *self._early}
            deadline = self.now + election_seconds(self._elastic.silence_seconds, len(self.view.nodes))
            self._takeover = _Takeover(
                lost, event.address, missing, ended, event.gone, event.new, deadline, self._early
            )
            return
        self._has_said_end = False  # the report of the end may have been lost with the node before
        self._report(self._hello())

    def _hello(self) -> Hello:
        recent = self.view.recent[-_KNOWN_CHANGES:]
        # A node that came late has got the whole view once: the others know it in parts.
        changes = tuple(change for change in recent if not change.whole or change is recent[-1])
        return Hello(self._facts(), self.view.term, self.view.version, changes)

    def _on_hello(self, sender: str, message: Hello) -> None:
        takeover = self._takeover
        if takeover is not None and sender in takeover.ended:
            return  # it has ended since
        if takeover is not None:
            takeover.reports[sender] = message
            takeover.missing.discard(sender)
            self._lead_if_complete()
        elif self.group is not None:
            self._send(sender, LeftOut("it reported too late after the node that decided was lost"))
        else:
            self._early[sender] = message

    def _lead_if_complete(self) -> None:
        """Lead as soon as all that may run have reported."""
        if self._takeover is not None and not self._takeover.missing:
            self._lead_or_stop(self._takeover)

    def _lead_or_stop(self, takeover: _Takeover) -> None:
        """Lead, unless the others may go on with the node that led: it may be out of reach for this one alone."""
        here = {self.own, *takeover.reports}
        before = self.view.nodes
        known = self._catch_up(takeover)
        came = {*takeover.new, *(self.view.nodes.keys() - before.keys())}
        lists = (self.view.nodes, {*before, *self.view.nodes, *takeover.gone} - came)
        if known and all(may_continue(members, here, takeover.ended, takeover.lost) for members in lists):
            self._lead(takeover)
            return
        self._takeover = None
        hosts = sorted({node.host for name, node in self.view.nodes.items() if name not in here | takeover.ended})
        lost = f"lost contact with {', '.join(hosts)}, which may continue the run"
        self._actions.append(GiveUp(f"{lost}; this node stops to avoid a split.", alone=True))

    def _catch_up(self, takeover: _Takeover) -> bool:
        """Apply the last changes of the view that others have seen; return False if too many are missing."""
        known = {change.version: change for report in takeover.reports.values() for change in report.changes}
        newest = max([self.view.version, *(report.version for report in takeover.reports.values())])
        for version in range(self.view.version + 1, newest + 1):
            if version not in known and not (version := min((v for v in known if known[v].whole), default=0)):
                return False
            self._on_view_change(known[version])
        self.view.term = max([self.view.term, *(report.term for report in takeover.reports.values())])
        return self.own in self.view.nodes

    def _lead(self, takeover: _Takeover) -> None:
        """Decide from now on; the ranks of the lost node are replaced, or left out."""
        self._takeover = None
        self._actions.append(Lead(self.view.term))
        for node in sorted(takeover.reports.keys() - self.view.nodes.keys()):  # the leader before has left it out
            del takeover.reports[node]
            self._send(node, LeftOut("it was lost, and the others have gone on"))
        lost = [node for node in self.view.nodes if node != self.own and node not in takeover.reports]
        for node, report in takeover.reports.items():
            for change in self.view.since(report.version) if report.version < self.view.version else []:
                self._send(node, change)
        members: list[Rank] = []
        ready: list[tuple[Rank, RankReady]] = []
        for node, report in {**takeover.reports, self.own: self._hello()}.items():
            for facts in report.ranks:
                rank = self.here.get(facts.key) if node == self.own else None
                rank = rank or Rank(facts.key, node, facts.slot, facts.rank, facts.local_rank, facts.code)
                members += [rank] * facts.is_member
                ready += [(rank, facts.ready)] if facts.ready is not None else []
        present = {rank.rank for rank in members}
        members += [
            Rank(f"lost-{rank}", name if name in lost else takeover.lost, rank, rank)  # some were lost just before
            for name, ranks in self.view.ranks_by_node().items()
            for rank in ranks
            if rank not in present
        ]
        self.view.generation = max(1, self.view.generation)  # a group that has begun
        if not members:  # this node came late, and all that trained are lost
            self._actions.append(GiveUp("no rank is left that holds the state of the run"))
        members.sort(key=lambda rank: rank.rank)
        self.group = self._group(members)
        self.group.address = takeover.address
        self._ended -= set(lost)
        self.group.on_nodes_lost(lost, lost)  # the reports of the others are their consent
        for rank, last_report in ready:
            self.group.on_message(rank, last_report)
        for sender, message in takeover.waiting:
            self._on_mail(sender, message)


def _place(order: Wire) -> Wire:
    """Return an order as it travels: of a position what differs between ranks."""
    if not isinstance(order, Position):
        return order
    return Place(order.rank, order.local_rank, order.local_world_size, order.node_rank)


@dataclasses.dataclass
class _Takeover:
    """What a node that takes over waits for."""

    lost: str
    address: tuple[str, int]
    missing: set[str]
    ended: set[str]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    deadline: float
    reports: dict[str, Hello] = dataclasses.field(default_factory=dict)
    waiting: list[tuple[str, Wire]] = dataclasses.field(default_factory=list)
