"""Decide which processes are the ranks of a run: lost ones are replaced, and the others keep their processes.

With several machines one launcher decides for all. `policy` says what follows from a loss, `group_state` has the states
of a change. Example: r0, r1 and r2 train in generation 4, and the process r1 is killed after step 17.

    launcher                                    r0                  r2                  r3
    r1 ended; policy: replace; leaving          gets abort          gets abort          is started in r1's slot
    all have aborted: sends release             ready, step 17      ready, step 17      imports torch
    r3 is ready too: forming, generation 5      form: rank 0 of 3   form: rank 2 of 3   form: rank 1 of 3
    all have joined: running                    joined 5            joined 5            joined 5, has the state of r0

If r2 is lost before r3 is ready, the group is leaving still: both losses are one failure, and one more rank is started.
If r2 is lost while the others join generation 5, that is the next failure: r0 and r3 leave again, for generation 6. If
r0 and r2 are both lost before r3 has joined, no rank holds the state: the launcher starts all again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from phalanx.errors import EXIT_USAGE
from phalanx.launch.group import RankState
from phalanx.launch.launcher_loop import RankAborted, RankInterrupted, RankJoined, RankReady, parse
from phalanx.launch.spec import Elastic
from phalanx.observe.events import Message, RankLost
from phalanx.recovery.launcher.group_state import GroupState, Processes
from phalanx.recovery.launcher.policy import Decision, Facts, decide, patience, pause

_TRIES = 3
"""Consecutive failed starts, or interruptions without a lost rank, before giving up."""


class Membership:
    """Takes what ranks report, losses and requests, and changes the group."""

    def __init__(
        self,
        elastic: Elastic,
        members: Iterable[RankState],
        processes: Processes,
        *,
        failures: int,
        max_restarts: int,
        later: Callable[[float, Callable[[], None]], None],
        report: Callable[[dict[str, Any]], None],
        give_up: Callable[[str], None],
        generation: int = 0,
    ) -> None:
        """`give_up`: ends the attempt, where no lost rank says why. `generation`: as in `GroupState`."""
        self._elastic, self._processes = elastic, processes
        self._max_restarts, self.failures = max_restarts, failures
        self._later, self._report, self._give_up = later, report, give_up
        self.group = GroupState(elastic, members, processes, generation)
        self._failed_starts = self._without_step = 0
        self._last_step = -1
        self._said_short = False
        """Slow processes, which the next loss of a rank ends as well."""

    # --- what ranks report --------------------------------------------------------------------------------------

    def take(self, state: RankState, message: dict[str, Any]) -> None:
        """Take a message of a rank: it has joined its group, was interrupted, has aborted, or is ready for the next."""
        if state.code is not None or state.dismissed:  # it was lost after it had sent this
            return
        received = parse(message)
        noticed = isinstance(received, (RankReady, RankInterrupted)) and state in self.group.members
        if noticed and self.group.state != "leaving":  # before the launcher
            self._leave(f"rank {state.rank} was interrupted: {received.why[:200]}")
        if isinstance(received, RankJoined) and received.generation == self.group.generation:
            self.group.sizes.fix(self.group.size, received.fixed)
            if self.group.take_joined(state):
                self._failed_starts = 0
                self._fill()
                self._grow("more ranks are there")
        elif isinstance(received, RankAborted):
            self.group.take_aborted(state)
        elif isinstance(received, RankReady):
            self.group.take_ready(state, received.step)
            self._check_ended()
            self._form_if_ready()

    def take_end(self, state: RankState) -> None:
        """Take a rank that has finished."""
        if not self.group.spares_only and state in self.group.members:
            self._check_ended()

    def _check_ended(self) -> None:
        """Give up where ranks wait, or left because of an error, and others have ended: these do not come back."""
        members, change = self.group.members, self.group.change
        ended = [member.rank for member in members if member.code is not None]
        if not ended or self.group.state != "leaving" or change is None:
            return
        if not change.requested or any(member.key in self.group.steps for member in members):
            self._give_up(f"{'; '.join(change.reasons)}, and rank {ended[0]} has finished already")

    def _leave(self, why: str, lost: Sequence[int] = ()) -> None:
        self.group.leave(why, lost)
        self._check_ended()

    def _form_if_ready(self) -> None:
        group = self.group
        if group.state == "running" and group.change is not None and 0 < group.missing <= len(group.able):
            group.leave_at_a_step()  # those who were added are ready
        if not group.is_ready:
            return
        step = max((group.steps[member.key] for member in group.members), default=-1)
        self._without_step = self._without_step + 1 if step <= self._last_step else 0
        self._last_step = max(step, self._last_step)
        change = group.change
        if change is not None and not change.lost and not change.requested and self._without_step > _TRIES:
            self._give_up(f"{'; '.join(change.reasons)}; no step was complete since the last {_TRIES} interruptions")
            return
        group.form(self.failures)

    # --- losses and replacements --------------------------------------------------------------------------------

    def take_loss(self, *ended: RankState, how: str, replaceable: bool = True) -> bool:
        """Take ranks that were lost together; return whether the run goes on without a restart.

        `how`: the end of a sentence that begins with "rank 3". `replaceable`: not where a machine was lost.
        """
        for state in ended:
            self.group.steps.pop(state.key, None)
            state.code = -1 if state.code is None else state.code
        lost = [state for state in ended if state in self.group.members]
        fails = [not self._lose_new(state, how) for state in ended if state not in lost]
        if not lost:
            self._later(pause(self._failed_starts), self._fill)
            return not any(fails)
        if self.group.state == "starting":
            return False
        decision = decide(self._facts(lost, replaceable))
        if decision.kind == "give_up":
            self._say(f"rank {lost[0].rank} {how}; no recovery in place: {decision.why}")
            return False
        self.failures = self._count()
        for state in lost:
            self._processes.retire(state)
        self._execute(decision, lost, how)
        return True

    def _count(self) -> int:
        """Return the number of failures with the present one: ranks that are lost together are one."""
        change = self.group.change
        together = self.group.state == "leaving" and change is not None and bool(change.lost)
        return self.failures + (not together)

    def _lose_new(self, state: RankState, how: str) -> bool:
        """Take the loss of a rank that was not in the group yet; return False where the others cannot go on."""
        group = self.group
        if state in group.spares:
            group.spares.remove(state)
        else:
            group.starting -= Counter([state.node])  # not below zero
            self._failed_starts += 1
        hopeless = self._failed_starts > _TRIES or state.code == EXIT_USAGE
        if hopeless and group.state != "running":
            return False  # it is not forgotten: its error is the cause
        self._processes.retire(state)
        if hopeless and group.change is not None:
            self._say(f"no ranks were added: a new one {how}")
            group.drop_request()
        return True

    def lose_node(self, node: str) -> None:
        """Forget the processes of a lost machine that have not reported yet."""
        if self.group.starting.pop(node, 0):
            self._later(0.0, self._fill)

    def _facts(self, lost: list[RankState], replaceable: bool) -> Facts:
        group = self.group
        others = [state for state in group.members if state not in lost]
        return Facts(
            lost=[state.code or 0 for state in lost],
            present=sum(state.key in group.holders and state.code is None for state in others),
            spares=len(group.spares),
            size=group.size,
            sizes=group.sizes.allowed,
            ended=sum(state.code is not None for state in others),
            failures=self._count(),
            max_restarts=self._max_restarts,
            without_progress=self._without_step,
            missing=len(lost),
            replaceable=replaceable,
        )

    def _execute(self, decision: Decision, lost: list[RankState], how: str) -> None:
        for state in lost:
            self.group.members.remove(state)
            self._report(RankLost(state.rank, how, decision.kind, decision.size, decision.why).to_dict())
        self.group.size = decision.size
        ranks = ", ".join(f"rank {state.rank}" for state in lost)
        self._leave(f"{ranks} {how}", [state.rank for state in lost])
        self._later(decision.pause, self._fill)

    def _say(self, text: str) -> None:
        self._report(Message("warning", text).to_dict())

    def _fill(self) -> None:
        """Start what is missing; spare ranks, which have loaded everything already, come first."""
        group = self.group
        if group.state == "starting":
            return
        wanted = group.size + (self._elastic.spares if group.state == "running" else 0)
        if (missing := wanted - group.present) > 0 and self._failed_starts <= _TRIES:
            group.starting.update(self._processes.start(missing, self.group.generation + 1))
            if group.present >= group.size and (short := wanted - group.present) > 0 and not self._said_short:
                self._said_short = True
                self._say(f"{short} of {self._elastic.spares} spare ranks are missing: no machine has room for more")
        if group.present < group.size:
            self._do_with_less()
        self._form_if_ready()

    def _do_with_less(self) -> None:
        """Choose a smaller number of ranks: no machine has room for more processes."""
        group = self.group
        if group.state == "running":
            group.drop_request()
            return
        group.size = group.sizes.below(group.present)
        if not group.size:
            self._give_up(f"{group.present} ranks are left: fewer than the run may have")

    # --- another number of ranks --------------------------------------------------------------------------------

    def resize(self, size: int, why: str) -> str | None:
        """Change the number of ranks at a step's boundary; return why that is not possible, if so."""
        group = self.group
        if refused := group.sizes.refusal(size):
            return refused
        group.sizes.most = size
        if size == len(group.members):
            return None
        group.request(size, why)
        if size < len(group.members):
            group.leave_at_a_step()
            return None
        self._failed_starts = 0
        self._fill()  # new ranks get ready while the others train
        return None if group.size == size else f"no machine has room for {size} ranks."

    def take_arrival(self, node: str, ranks: int, who: str) -> None:
        """Take in ranks of a machine that has arrived, as many as the run can use."""
        self.group.starting[node] += ranks
        self._grow(f"{who} arrived")

    def _grow(self, why: str) -> None:
        """Let ranks that are there, or get ready, take part as far as the run can use them."""
        group = self.group
        most = group.sizes.below(min(group.sizes.most, group.present - self._elastic.spares))
        if most > len(group.members) and group.is_settled:
            group.request(most, why)
            self._form_if_ready()

    def find_late(self) -> list[RankState]:
        """Return ranks that have not left or joined for long; those of them that make no progress are to be killed."""
        is_late = time.monotonic() - self.group.since > patience(self._elastic.silence_seconds)
        return self.group.unfinished if is_late else []
