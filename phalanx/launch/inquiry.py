"""Ask all ranks for their collectives and stacks, also those of other machines, and find the rank to blame."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.host.reminders import duration_text
from phalanx.launch.blame import Blame, find_blame
from phalanx.launch.collectives import ASK, RankCalls
from phalanx.launch.diagnosis import Evidence
from phalanx.launch.environment import NodeInfo
from phalanx.launch.failure import FailureReport
from phalanx.launch.group import RankGroup, RankState
from phalanx.launch.output import RankConsole
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.spec import LaunchSpec
from phalanx.launch.startup_watch import Hang, StartWatch

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 1.0
"""How long ranks may take to answer; one that holds the interpreter lock never does."""
_STACK_SECONDS = 0.3
"""How long such a rank may then take to write the stack of its main thread."""
_NODES_SECONDS = 2.5
"""How long other machines may take to send what their ranks have answered."""
_SENT_CALLS = 64
"""How many of the latest calls in each group go to another machine."""
_USUAL_STEPS = 20

Later = Callable[[float, Callable[[], None]], None]


@dataclass
class _Question:
    then: list[Callable[[Blame | None], None]]
    number: int = 0
    """The number that other machines know it by."""
    answers: dict[int, list[RankCalls]] = field(default_factory=dict)
    """By machine."""


class Inquiry:
    """Asks ranks while the launcher goes on; a callback gets the result."""

    def __init__(
        self, node: NodeInfo, group: RankGroup, evidence: Evidence, rendezvous: Rendezvous, later: Later
    ) -> None:
        self._node, self._group, self._evidence, self._rendezvous = node, group, evidence, rendezvous
        self._later = later
        self._remote: _Question | None = None

    def find_blame(self, then: Callable[[Blame | None], None]) -> None:
        """Ask the ranks of all machines, and call `then` with the rank to blame."""
        if not self._rendezvous.has_other_nodes:
            self.ask_ranks(lambda calls: then(find_blame(calls)))
            return
        if self._remote is not None:  # a notice and a failure may ask at the same time: both get the answers
            self._remote.then.append(then)
            return
        question = self._remote = _Question([then])
        self._rendezvous.ask_calls()
        self._later(_NODES_SECONDS, lambda: self._finish(question))

    def ask_ranks(
        self, then: Callable[[list[RankCalls]], None], ranks: list[RankState] | None = None, *, insist: bool = True
    ) -> None:
        """Ask ranks of this machine for stacks and records; with `insist` one that holds the lock for its stack."""
        asked = time.time()
        states = list(self._group.ranks.values()) if ranks is None else ranks
        self._group.signal(ASK, [state for state in states if state.alive])

        def poll(deadline: float, *, insisted: bool) -> None:
            due = [state for state in states if not self._evidence.has_answered(state, asked)]
            if due and time.time() < deadline:
                self._later(_POLL_SECONDS, lambda: poll(deadline, insisted=insisted))
            elif due and not insisted:
                self._group.signal(signal.SIGQUIT, due)
                self._later(_STACK_SECONDS, lambda: poll(0.0, insisted=True))
            else:
                then(self._evidence.collect_calls(states, asked))

        poll(asked + _ANSWER_SECONDS, insisted=not insist)

    def name_missing(self, hang: Hang, then: Callable[[FailureReport], None]) -> None:
        """Ask the ranks that never joined where they are, and call `then` with the report."""
        missing = [state for state in self._group.alive if state.rank in hang.missing]
        states = list(self._group.ranks.values())
        self.ask_ranks(lambda _: then(self._evidence.explain_hang(hang, states)), missing)

    def describe_start(self, watch: StartWatch, notice: Callable[[str], None]) -> None:
        """Say where the first rank is, while none has joined."""
        first = next(iter(self._group.ranks.values()))

        def describe(_: list[RankCalls]) -> None:
            if watch.quiet:
                notice(self._evidence.describe_slow_start(first, watch.waited(time.monotonic())))

        self.ask_ranks(describe, [first])

    # --- several machines ---------------------------------------------------------------------------------------

    def take_question(self, number: int, *, own: bool) -> None:
        """Answer a question of this or another machine."""
        if own and self._remote is not None:
            self._remote.number = number

        def answer(calls: list[RankCalls]) -> None:
            self._rendezvous.send_calls(number, [each.to_message(_SENT_CALLS) for each in calls])
            if own:
                self._take(number, self._node.node_rank, calls)

        self.ask_ranks(answer)

    def take_answer(self, message: dict[str, Any]) -> None:
        """Take what the ranks of another machine have answered."""
        self._take(message["number"], message["from"], [RankCalls.from_message(each) for each in message["calls"]])

    def _take(self, number: int, node_rank: int, calls: list[RankCalls]) -> None:
        if (question := self._remote) is not None and question.number == number:
            question.answers[node_rank] = calls
            if len(question.answers) == self._node.num_nodes:
                self._finish(question)

    def _finish(self, question: _Question) -> None:
        if self._remote is question:
            self._remote = None
            found = find_blame([each for calls in question.answers.values() for each in calls])
            for then in question.then:
                then(found)


class StallNotice:
    """Reports once, without ending anything, which rank the others have waited for longer than is usual."""

    def __init__(
        self,
        spec: LaunchSpec,
        node: NodeInfo,
        group: RankGroup,
        evidence: Evidence,
        inquiry: Inquiry,
        console: RankConsole,
    ) -> None:
        self._limit = spec.stall_notice if node.world_size > 1 and node.node_rank == 0 else 0.0
        self._group, self._evidence, self._inquiry, self._console = group, evidence, inquiry, console
        self._next = time.monotonic() + self._limit
        self._reported = 0.0
        self.blame: Blame | None = None
        """What was reported last: the ranks may be unable to answer when the run ends because of it."""

    @property
    def next_deadline(self) -> float | None:
        """When `check` has something to do."""
        return self._next if self._limit else None

    def check(self, now: float) -> None:
        """Ask the ranks of this machine, where they have made no progress for long."""
        if not self._limit or now < self._next:
            return
        self._next = now + self._limit / 2
        limit = max(self._limit, _USUAL_STEPS * self._evidence.usual_step(self._group.alive))
        last = self._evidence.last_progress(self._group.alive)
        if last is None or time.time() - last >= limit:
            self._inquiry.ask_ranks(lambda calls: self._judge(calls, limit), insist=False)

    def _judge(self, calls: list[RankCalls], limit: float) -> None:
        """Compare all ranks where one has waited too long, except in a call that has been reported."""
        pending = [call.began for each in calls for call in each.calls if not call.done]
        if pending and self._reported < min(pending) < time.time() - limit:
            self._inquiry.find_blame(self._report)

    def _report(self, blame: Blame | None) -> None:
        if blame is not None and blame.since > self._reported:
            self._reported, self.blame = blame.since, blame
            waited = duration_text(time.time() - blame.since)
            self._console.notice(f"the ranks have waited for {waited}: {blame}")
