"""Ask all ranks for their collectives and stacks, also those of other nodes, and find the cause of a failure."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.diagnosis.blame import Blame, find_blame
from phalanx.diagnosis.calls import RankCalls
from phalanx.diagnosis.evidence import Evidence
from phalanx.diagnosis.exits import YIELD_SECONDS
from phalanx.launch.agent_messages import Calls, CallsWanted, SilentNodes
from phalanx.launch.context import Handlers, LauncherContext
from phalanx.launch.group import RankState
from phalanx.launch.launcher_loop import duration_text
from phalanx.launch.rank_files import ASK
from phalanx.launch.watches import Hang, StartWatch, Watch

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 2.0
"""How long ranks may take to answer, on a busy machine, too; one that holds the interpreter lock never does."""
_STACK_SECONDS = 0.5
"""How long such a rank may then take to write the stack of its main thread."""
_NODES_SECONDS = 4.0
"""How long other nodes may take to send what their ranks have answered."""
_SENT_CALLS = 64
"""How many of the latest calls in each group go to another node."""
_USUAL_STEPS = 20
_REMOTE_SECONDS = 2.5
"""How much longer a lost connection is not taken for the cause with several nodes: until a lost node is known."""


@dataclass
class _Question:
    then: list[Callable[[Blame | None], None]]
    number: int = 0
    """The number that other nodes know it by."""
    answers: dict[int, list[RankCalls]] = field(default_factory=dict)
    """By node."""


class Inquiry:
    """Asks ranks while the launcher goes on; a callback gets the result."""

    def __init__(self, context: LauncherContext, evidence: Evidence) -> None:
        self._context, self._evidence = context, evidence
        self._remote: _Question | None = None

    def find_blame(self, then: Callable[[Blame | None], None]) -> None:
        """Ask the ranks of all nodes, and call `then` with the rank to blame."""
        if not self._context.rendezvous.has_other_nodes:
            self.ask_ranks(lambda calls: then(find_blame(calls)))
            return
        if self._remote is not None:  # a notice and a failure may ask at the same time: both get the answers
            self._remote.then.append(then)
            return
        question = self._remote = _Question([then])
        self._context.rendezvous.ask_calls()
        self._context.later(_NODES_SECONDS, lambda: self._finish(question))

    def ask_ranks(
        self, then: Callable[[list[RankCalls]], None], ranks: list[RankState] | None = None, *, insist: bool = True
    ) -> None:
        """Ask ranks of this node for stacks and records; with `insist` one that holds the lock for its stack."""
        began = time.time()
        states = self._context.group.states if ranks is None else ranks
        self._context.group.signal(ASK, [state for state in states if state.alive])

        def poll(deadline: float, *, has_insisted: bool) -> None:
            due = [state for state in states if not self._evidence.has_answered(state, began)]
            if due and time.time() < deadline:
                self._context.later(_POLL_SECONDS, lambda: poll(deadline, has_insisted=has_insisted))
            elif due and not has_insisted:
                self._context.group.signal(signal.SIGQUIT, due)
                self._context.later(_STACK_SECONDS, lambda: poll(0.0, has_insisted=True))
            else:
                then(self._evidence.collect_calls(states, began))

        poll(began + _ANSWER_SECONDS, has_insisted=not insist)

    # --- several nodes ---------------------------------------------------------------------------------------

    def answer_question(self, wanted: CallsWanted) -> None:
        """Answer a question of this or another node."""
        if wanted.is_own and self._remote is not None:
            self._remote.number = wanted.number
        node_rank = self._context.node.node_rank

        def answer(calls: list[RankCalls]) -> None:
            records = [record.to_message(_SENT_CALLS) for record in calls]
            self._context.rendezvous.send_calls(wanted, node_rank, records)
            if wanted.is_own:
                self._add_answer(wanted.number, node_rank, calls)

        self.ask_ranks(answer)

    def handle_answer(self, message: Calls) -> None:
        """Keep what the ranks of another node have answered."""
        calls = [RankCalls.from_message(record) for record in message.calls]
        self._add_answer(message.number, message.node_rank, calls)

    def _add_answer(self, number: int, node_rank: int, calls: list[RankCalls]) -> None:
        if (question := self._remote) is not None and question.number == number:
            question.answers[node_rank] = calls
            if len(question.answers) == self._context.node.num_nodes:
                self._finish(question)

    def _finish(self, question: _Question) -> None:
        if self._remote is question:
            self._remote = None
            blame = find_blame([record for calls in question.answers.values() for record in calls])
            for then in question.then:
                then(blame)


class StallNotice:
    """Reports once, without ending anything, which rank the others have waited for longer than is usual."""

    def __init__(self, context: LauncherContext, evidence: Evidence, inquiry: Inquiry) -> None:
        self._context, self._evidence, self._inquiry = context, evidence, inquiry
        compares = context.node.world_size > 1 and context.node.node_rank == 0
        self._limit = context.spec.stall_notice if compares else 0.0
        self._next = time.monotonic() + self._limit
        self._reported = 0.0
        self.blame: Blame | None = None
        """What was reported last: the ranks may be unable to answer when the run ends because of it."""

    @property
    def next_deadline(self) -> float | None:
        """When `check` has something to do."""
        return self._next if self._limit else None

    def check(self, now: float) -> None:
        """Ask the ranks of this node, where they have made no progress for long."""
        if not self._limit or now < self._next:
            return
        self._next = now + self._limit / 2
        evidence, ranks = self._evidence, self._context.group.alive
        limit = max(self._limit, _USUAL_STEPS * evidence.usual_step(ranks))
        last = evidence.last_progress(ranks)
        if last is None or time.time() - last >= limit:
            self._inquiry.ask_ranks(lambda calls: self._judge(calls, limit), insist=False)

    def _judge(self, calls: list[RankCalls], limit: float) -> None:
        """Compare all ranks where one has waited too long, except in a call that has been reported."""
        pending = [call.began for record in calls for call in record.calls if not call.done]
        if pending and self._reported < min(pending) < time.time() - limit:
            self._inquiry.find_blame(self._report)

    def _report(self, blame: Blame | None) -> None:
        if blame is not None and blame.since > self._reported:
            self._reported, self.blame = blame.since, blame
            duration = duration_text(time.time() - blame.since)
            self._context.console.notice(f"the ranks have waited for {duration}: {blame}")


class Diagnosis:
    """Finds the cause of a failure: at once after a real error, a little later after ranks that only lost others."""

    def __init__(self, context: LauncherContext, attempt: int) -> None:
        """Read what the ranks of this attempt write; OSError if the log folder cannot be written."""
        self._context = context
        self.evidence = Evidence(context.spec, context.node)
        self.evidence.clear([state.rank for state in context.group.states], attempt)
        self.inquiry = Inquiry(context, self.evidence)
        self.notice = StallNotice(context, self.evidence, self.inquiry)
        self._silent_nodes: list[str] = []
        self.is_pending = False
        """Whether a rank has failed, and its cause is not known yet."""
        self.is_asking = False
        """Whether ranks were asked, and what they answer ends the attempt."""

    @property
    def watches(self) -> list[Watch]:
        """What depends on the clock."""
        return [self.notice]

    @property
    def handlers(self) -> Handlers:
        """By kind, what to do about a message of the store agent."""
        return {
            CallsWanted: self.inquiry.answer_question,
            Calls: self.inquiry.handle_answer,
            SilentNodes: self.note_silent_nodes,
        }

    def describe(self, state: RankState) -> str:
        """Return how a rank ended, as the end of a sentence that begins with its name."""
        return self.evidence.describe(state)

    def note_late(self, slot: int, text: str) -> None:
        """Note that a rank has waited too long for an operation that raises no error."""
        self.evidence.note_late(slot, text)

    def close(self) -> None:
        """Close the heartbeats."""
        self.evidence.close()

    def assess(self, rank_state: RankState) -> None:
        """Find the cause after a rank has failed."""
        aborted = rank_state.code == -signal.SIGABRT  # its last words, which say why, may still be in its pipe
        if aborted or self.evidence.of(rank_state).lost_peer:
            self.find_soon()
        else:
            self.find()

    def find_soon(self) -> None:
        """Look for the cause when other ranks have had the time to report theirs."""
        if not self.is_pending:
            self.is_pending = True
            more = _REMOTE_SECONDS if self._context.rendezvous.has_other_nodes else 0.0
            self._context.later(YIELD_SECONDS + more, self.find)

    def find(self) -> None:
        """Look for the cause; where every rank only waited, compare what all have called, and where they are."""
        if self.is_asking or self._context.is_stopping():
            return
        evidence, states = self.evidence, self._context.group.states
        if not evidence.only_waited(states):
            self._context.fail(evidence.find_failure(states))
        else:
            self.is_asking = self.is_pending = True
            self.inquiry.find_blame(self.report)

    def note_silent_nodes(self, message: SilentNodes) -> None:
        """Note which nodes have no heartbeat at present."""
        self._silent_nodes = list(message.nodes)

    def report(self, blame: Blame | None) -> None:
        """End the attempt with the rank to blame."""
        nodes = self._silent_nodes if self._context.rendezvous.has_other_nodes else None
        states = self._context.group.states
        self._context.fail(self.evidence.explain_waiting(states, blame or self.notice.blame, nodes))

    def name_missing(self, hang: Hang) -> None:
        """Ask the ranks that never joined where they are, and end the attempt with that."""
        self.is_asking = True
        evidence, states = self.evidence, self._context.group.states
        absent = [state for state in states if state.alive and state.rank in hang.missing]
        self.inquiry.ask_ranks(lambda _: self._context.fail(evidence.explain_hang(hang, states)), absent)

    def describe_start(self, watch: StartWatch) -> None:
        """Say where the first rank is, while none has joined."""
        first, context = self._context.group.states[0], self._context

        def describe(_: list[RankCalls]) -> None:
            if watch.quiet:
                context.console.notice(self.evidence.describe_slow_start(first, watch.waited(time.monotonic())))

        self.inquiry.ask_ranks(describe, [first])
