"""The launcher of an elastic run: finds out what happens to ranks and nodes, and does what `node.Node` says."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from phalanx.diagnosis import Diagnosis
from phalanx.host import messages
from phalanx.host.processes import is_stopped
from phalanx.host.wire import Wire, decode, encode
from phalanx.launch.agent_messages import Agreed, Lead, LeaderLost, Mailed, NodeArrived, NodesLost, TakeIn, WatchNodes
from phalanx.launch.context import Handlers, LauncherContext
from phalanx.launch.environment import NodeInfo
from phalanx.launch.failure import FailureReport
from phalanx.launch.group import RankState
from phalanx.launch.watches import Watch
from phalanx.recovery.launcher.node import Node
from phalanx.recovery.launcher.policy import patience
from phalanx.recovery.launcher.protocol import (
    Accept,
    Action,
    AllHereEnded,
    AllOver,
    AnswerRequest,
    Deliver,
    EndHere,
    Event,
    GiveUp,
    Later,
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
    Tell,
    Tick,
    Unsurvived,
)
from phalanx.recovery.launcher.requests import ScaleRequests
from phalanx.recovery.launcher.stall import StallWatch
from phalanx.recovery.launcher.view import GroupView
from phalanx.recovery.messages import End, NodeView, Position

_CHECK_SECONDS = 0.5
_PASS_SECONDS = 2.0
"""After this time the launcher that decides has not taken a request, so it does not see this log folder."""
_ANY_NUMBER = 1 << 30
"""A node alone has room for as many processes as are started."""


class ElasticControl:
    """Replaces lost ranks, or follows the launcher that does; a watch of the attempt."""

    def __init__(self, context: LauncherContext, diagnosis: Diagnosis, failures: int) -> None:
        """`failures`: how many were survived before this attempt."""
        assert context.spec.elastic is not None, "only then ranks are replaced"
        self._context, self._evidence, self._elastic = context, diagnosis.evidence, context.spec.elastic
        now = time.monotonic()
        self.node = Node(
            context.node.own,
            first_view(context.node, failures),
            self._elastic,
            [Rank(s.key, context.node.own, s.slot, s.rank, s.local_rank) for s in context.group.states],
            max_restarts=context.spec.max_restarts,
            now=now,
            epoch=time.time() - now,
            late=context.node.late,
        )
        self._stall = StallWatch(context, diagnosis)
        self._requests = ScaleRequests(context.spec.log_dir, context.console.notice)
        self._all_over = False
        self._waits_for = ("", "")
        self._carriers: Final[dict[type, Callable[[Any], None]]] = {
            Deliver: self._deliver,
            Start: self._start,
            Retire: self._retire,
            EndHere: self._end_here,
            Send: self._send,
            Accept: self._accept,
            NodesChanged: self._change_nodes,
            Lead: lambda action: context.rendezvous.send(action),
            Tell: lambda action: context.console.handle(action.event),
            Later: lambda action: context.later(action.seconds, lambda: self._handle(action.event)),
            GiveUp: self._give_up,
            Unsurvived: self._end_with,
            AnswerRequest: lambda action: self._requests.attempt(lambda: self._requests.answer(action.refused)),
            AllOver: self._note_end,
        }

    # --- what the attempt asks ----------------------------------------------------------------------------------------

    @property
    def watches(self) -> list[Watch]:
        """What depends on the clock."""
        return [self]

    @property
    def handlers(self) -> Handlers:
        """By kind, what to do about a message of the store agent."""
        return {
            Mailed: self._handle,
            NodeArrived: self._on_arrival,
            NodesLost: self._handle,
            Agreed: self._handle,
            LeaderLost: self._on_lost_leader,
        }

    @property
    def failures(self) -> int:
        """How many failures the run has survived."""
        return self.node.failures

    def listen(self) -> None:
        """Handle messages of the ranks of this node, which have been started."""
        for state in self._context.group.states:
            self._listen(state)

    def on_loss(self, ended: RankState, how: str) -> bool:
        """Replace a rank that has ended with an error; return whether the run goes on."""
        failure = {} if self.node.leads else self._evidence.find_failure([ended]).to_message()
        actions = self.node.handle(RankCrashed(ended.key, ended.code or 0, how, failure), time.monotonic())
        self._carry_out(actions)
        return not any(isinstance(action, Unsurvived) for action in actions)

    def on_end(self, ended: RankState) -> None:
        """Note a rank that has finished."""
        self._handle(RankFinished(ended.key))

    def on_overdue(self) -> None:
        """Kill the rank that others have waited for too long over nccl; report it if it is not of this node."""
        self._stall.end_late(self)

    def end(self) -> None:
        """Let ranks that wait for a place end: the attempt is over."""
        self._carry_out(self.node.end(time.monotonic()))

    def all_ended(self) -> bool:
        """Whether the ranks of all nodes have ended; called when those of this one have."""
        if not self._all_over:
            self._handle(AllHereEnded())
        return self._all_over

    @property
    def next_deadline(self) -> float:
        """When `check` may next have something to do."""
        return time.monotonic() + _CHECK_SECONDS

    def check(self, now: float) -> None:
        """Kill ranks that are stopped or stuck, pass on requests, and let the node know that time has passed."""
        self._stall.end(self._find_silent)
        if self.node.takes_requests:
            self._requests.attempt(self._ask_for_ranks)
        self._handle(Tick())
        self._stall.check(self)

    @property
    def unchanged_since(self) -> float:
        """When the ranks began to train in this group; infinity while it changes."""
        return self.node.unchanged_since

    @property
    def members_here(self) -> list[RankState]:
        """The ranks of this node that train."""
        members = self.node.members_here
        return [state for state in self._context.group.alive if state.key in members]

    # --- what happens -------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        self._carry_out(self.node.handle(event, time.monotonic()))

    def _listen(self, state: RankState) -> None:
        control = self._context.group.controls[state.key]

        def read() -> None:
            received = messages.receive(control)
            if received is None:
                self._context.selector.unregister(control)
            else:
                self._handle(RankSpoke(state.key, decode(received[0])))

        if control in self._context.selector.get_map():
            self._context.selector.unregister(control)
        self._context.selector.register(control, selectors.EVENT_READ, read)

    def _on_arrival(self, event: NodeArrived) -> None:
        if not self._context.is_stopping():  # else it will find the next attempt, if there is one
            self._handle(event)

    def _on_lost_leader(self, event: LeaderLost) -> None:
        self._context.console.notice(f"the node {event.host}, which led the run, was lost")
        self._handle(event)

    def _ask_for_ranks(self) -> None:
        """Let the node carry out a user's request, or pass it on if the leader does not see this folder."""
        wanted = self._requests.take(after=0.0 if self.node.leads else _PASS_SECONDS)
        if wanted is not None:
            self._handle(Resized(wanted))

    def _find_silent(self) -> list[RankState]:
        """Return ranks to be killed: those stopped for too long, and late ones that make no progress either."""
        now, limit, stopped = time.monotonic(), self._elastic.silence_seconds, []
        for state in self._context.group.alive:
            if state.pid is None or not is_stopped(state.pid):
                state.stopped_since = None
            elif state.stopped_since is None:
                state.stopped_since = now
            elif now - state.stopped_since >= limit:
                stopped.append(state)
        late = self.node.late_here
        return [
            *stopped,
            *(state for state in self._context.group.alive if state.key in late and self._is_stuck(state)),
        ]

    def _is_stuck(self, state: RankState) -> bool:
        """Whether a rank of this node, which does not leave or join, makes no progress either."""
        if self._evidence.is_stuck(state, patience(self._elastic.silence_seconds)):
            return True
        activity = self._evidence.activity(state)
        if activity and (state.key, activity) != self._waits_for:
            self._waits_for = (state.key, activity)
            self._context.console.notice(f"rank {state.rank} is in {activity}: the others wait for it")
        return False

    # --- what to do ---------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._carriers[type(action)](action)

    def _deliver(self, action: Deliver) -> None:
        state = self._context.group.ranks.get(action.key)
        if state is not None and isinstance(action.order, Position):
            state.rank, state.local_rank = action.order.rank, action.order.local_rank
        self._order(action.key, action.order)

    def _order(self, key: str, order: Wire) -> None:
        control = self._context.group.controls.get(key)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: the fork server reports that
            if control is not None:
                messages.send(control, encode(order))

    def _start(self, action: Start) -> None:
        for _ in range(action.count):
            state = self._context.group.add(action.generation)
            self._handle(RankStarted(state.key, state.slot, state.local_rank))
            self._listen(state)

    def _retire(self, action: Retire) -> None:
        if (state := self._context.group.ranks.get(action.key)) is not None:
            self._context.group.retire(state)

    def _end_here(self, _: EndHere) -> None:
        for state in self._context.group.alive:
            self._order(state.key, End())

    def _send(self, action: Send) -> None:
        self._context.rendezvous.post(action.to, action.message)

    def _accept(self, action: Accept) -> None:
        here, view = self._context.node, self.node.view
        common = {"master_addr": here.master_addr, "master_port": here.master_port, "term": view.term}
        common["nodes"] = [[name, node.host, node.slots, node.standby] for name, node in view.nodes.items()]
        self._context.rendezvous.send(TakeIn(common, action.places))

    def _change_nodes(self, action: NodesChanged) -> None:
        entries = {
            name: None if node is None else {"host": node.host, "ranks": node.slots, "standby": node.standby}
            for name, node in action.nodes.items()
        }
        self._context.rendezvous.send(WatchNodes(entries, action.version))

    def _give_up(self, action: GiveUp) -> None:
        self._context.fail(FailureReport(cause=action.cause, exit_code=1), final=action.alone)

    def _end_with(self, action: Unsurvived) -> None:
        if action.failure is not None:  # else it is of this node, whose attempt looks for the cause itself
            self._context.fail(FailureReport.from_message(dict(action.failure)))

    def _note_end(self, _: AllOver) -> None:
        self._all_over = True


def first_view(place: NodeInfo, failures: int) -> GroupView:
    """Return the view of the group when a node begins; one that comes late gets the whole view from the leader."""
    nodes = {
        name: NodeView(host, slots, tuple(standby) if standby else None, ranks=0 if place.late else slots)
        for name, host, slots, standby in place.nodes
    }
    alone = {place.own: NodeView("", _ANY_NUMBER, ranks=place.world_size)}
    return GroupView(place.leader, nodes or alone, term=place.term, failures=failures)
