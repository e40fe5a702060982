"""Which processes are the ranks of a run while it runs: lost ones are replaced, and the others keep their processes.

    running --a rank is lost, or one is added--> leaving --all are ready--> forming --all have joined--> running

*leaving*: ranks abort the collective that they wait in, or stop at a step's boundary, and report their last step.
*forming*: each rank got its new position and joins the group of the next generation. A loss in either state begins
*leaving* again. `phalanx.world.membership` is the ranks' side. With several machines one launcher decides for all.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from phalanx.errors import EXIT_USAGE
from phalanx.launch.group import Processes, RankState, numbered
from phalanx.launch.policy import Change, Decision, Facts, Sizes, decide, patience, pause
from phalanx.launch.spec import Elastic
from phalanx.observe.events import Message, RankLost

_TRIES = 3
"""So often one after another a new rank may end before it is ready, or the ranks be interrupted without a loss."""


class Membership:
    """Decides which processes are ranks, and in which order."""

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
        """`give_up`: ends the attempt, where no lost rank says why. `generation`: of a group that another launcher has
        formed; its members hold the state of the run.
        """
        self._elastic, self._processes = elastic, processes
        self._max_restarts, self.failures = max_restarts, failures
        self._later, self._report, self._give_up = later, report, give_up
        self._members = list(members)
        self._spares: list[RankState] = []
        self._state: Literal["starting", "running", "leaving", "forming"] = "running" if generation else "starting"
        self._steps: dict[str, int] = {}
        """The last step of each process that is ready for the next generation."""
        self._joined, self._aborted = set[str](), set[str]()
        self._holders = {member.key for member in self._members} if generation else set()
        """Ranks that were in the last group, and so hold the state of the run."""
        self._size = len(self._members)
        self._sizes = Sizes(elastic.sizes)
        self.generation = generation
        self._starting: Counter[str] = Counter()
        """How many processes of each machine have not reported yet that they are ready."""
        self._failed_starts = 0
        self._change: Change | None = None
        self._since = time.monotonic()
        self._said_short = False
        self._unwanted: set[str] = set()
        """Slow processes, which the next loss of a rank ends as well."""
        self._last_step = -1
        self._stuck = 0

    @property
    def members(self) -> list[RankState]:
        """The ranks, in their order."""
        return list(self._members)

    @property
    def spares(self) -> list[RankState]:
        """Ranks that wait for a place."""
        return list(self._spares)

    # --- what arrives -------------------------------------------------------------------------------------------

    def take(self, state: RankState, message: dict[str, Any]) -> None:
        """Take a message of a rank: it has joined its group, was interrupted, has aborted, or is ready for the next."""
        if state.code is not None or state.dismissed:  # it was lost after it had sent this
            return
        why = message.get("ready", message.get("interrupted"))
        if why is not None and self._state != "leaving" and state in self._members:  # it noticed before the launcher
            self._leave(f"rank {state.rank} was interrupted: {why[:200]}")
        if "joined" in message and message["joined"] == self.generation:
            self._joined.add(state.key)
            self._holders.add(state.key)
            self._sizes.fix(self._size, message.get("fixed", ""))
            waits = self._state in ("starting", "forming")  # else one that has joined was lost meanwhile
            if waits and all(member.key in self._joined for member in self._members):
                self._enter("running")
                self._failed_starts = 0
                self._fill()
                self._grow("more ranks are there")
        elif "aborted" in message:
            self._aborted.add(state.key)
            if all(member.key in self._aborted or member.key in self._steps for member in self._members):
                for member in self._members:  # none of them uses what nccl's collectives leave when they are ended
                    self._processes.send(member, {"release": True})
        elif "ready" in message:
            self._steps[state.key] = message["step"]
            if state not in self._members and state not in self._spares:
                self._spares.append(state)
                self._starting[state.node] = max(0, self._starting[state.node] - 1)
            self._check_ended()
            self._form_if_all_ready()

    def take_end(self, state: RankState) -> None:
        """Take a rank that has finished: with the last one the spare ranks end."""
        if self.spares_only:
            self.end()
        elif state in self._members:
            self._check_ended()

    def _check_ended(self) -> None:
        """Give up where ranks wait, or left because of an error, and others have ended: these do not come back."""
        ended = [member.rank for member in self._members if member.code is not None]
        if not ended or self._state != "leaving" or self._change is None:
            return
        if not self._change.requested or any(member.key in self._steps for member in self._members):
            self._give_up(f"{'; '.join(self._change.reasons)}, and rank {ended[0]} has finished already")

    def take_loss(self, *ended: RankState, how: str, replaceable: bool = True) -> bool:
        """Take ranks that were lost together; return whether the run goes on without a restart.

        `how`: the end of a sentence that begins with "rank 3". `replaceable`: not where a machine was lost.
        """
        for state in ended:
            self._steps.pop(state.key, None)
            state.code = -1 if state.code is None else state.code
        lost = [state for state in ended if state in self._members]
        fails = [not self._lose_new(state, how) for state in ended if state not in lost]
        if not lost:
            self._later(pause(self._failed_starts), self._fill)
            return not any(fails)
        if self._state == "starting":
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
        together = self._state == "leaving" and self._change is not None and bool(self._change.lost)
        return self.failures + (not together)

    def _lose_new(self, state: RankState, how: str) -> bool:
        """Take the loss of a rank that was not in the group yet; return False where the others cannot go on."""
        if state in self._spares:
            self._spares.remove(state)
        else:
            self._starting[state.node] = max(0, self._starting[state.node] - 1)
            self._failed_starts += 1
        hopeless = self._failed_starts > _TRIES or state.code == EXIT_USAGE
        if hopeless and self._state != "running":
            return False  # it is not forgotten: its error is the cause
        self._processes.retire(state)
        if hopeless and self._change is not None:
            self._say(f"no ranks were added: a new one {how}")
            self._size, self._change = len(self._members), None
        return True

    def lose_node(self, node: str) -> None:
        """Forget the processes of a lost machine that have not reported yet."""
        if self._starting.pop(node, 0):
            self._later(0.0, self._fill)

    def _facts(self, lost: list[RankState], replaceable: bool) -> Facts:
        others = [state for state in self._members if state not in lost and state.code is None]
        return Facts(
            lost=[state.code or 0 for state in lost],
            present=sum(state.key in self._holders for state in others),
            spares=len(self._spares),
            size=self._size,
            sizes=self._sizes.allowed,
            ended=sum(member.code is not None and member not in lost for member in self._members),
            failures=self._count(),
            max_restarts=self._max_restarts,
            without_progress=self._stuck,
            missing=len(lost),
            replaceable=replaceable,
        )

    def exclude(self, ranks: Iterable[int]) -> None:
        """Go on without these slow ranks after the next loss of one, where the group may be that small."""
        self._unwanted |= {member.key for member in self._members if member.rank in ranks}

    def _dismiss_unwanted(self) -> None:
        unwanted = [member for member in self._members if member.key in self._unwanted]
        smaller = self._sizes.below(self._size - len(unwanted))
        if not unwanted or not smaller:
            return
        self._size = self._sizes.most = smaller  # of the most: else new ranks would take their places
        for member in unwanted:
            self._members.remove(member)
            member.dismissed = True
            self._report(RankLost(member.rank, "was slow", "shrink", smaller, "on_straggler = exclude").to_dict())
            self._processes.send(member, {"abort": "it is excluded"})
            self._processes.send(member, {"end": True})

    def _execute(self, decision: Decision, lost: list[RankState], how: str) -> None:
        for state in lost:
            self._members.remove(state)
            self._report(RankLost(state.rank, how, decision.kind, decision.size, decision.why).to_dict())
        self._size = decision.size
        self._dismiss_unwanted()
        ranks = ", ".join(f"rank {state.rank}" for state in lost)
        self._leave(f"{ranks} {how}", [state.rank for state in lost])
        self._later(decision.pause, self._fill)

    def _say(self, text: str) -> None:
        self._report(Message("warning", text).to_dict())

    def _fill(self) -> None:
        """Start what is missing; spare ranks, which have loaded everything already, come first."""
        if self._state == "starting":
            return
        wanted = self._size + (self._elastic.spares if self._state == "running" else 0)
        if (missing := wanted - self._present) > 0 and self._failed_starts <= _TRIES:
            self._starting.update(self._processes.start(missing, self.generation + 1))
            if self._present >= self._size and (short := wanted - self._present) > 0 and not self._said_short:
                self._said_short = True
                self._say(f"{short} of {self._elastic.spares} spare ranks are missing: no machine has room for more")
        if self._present < self._size:
            self._do_with_less()
        self._form_if_all_ready()

    @property
    def _present(self) -> int:
        return len(self._members) + len(self._spares) + sum(self._starting.values())

    def _do_with_less(self) -> None:
        """Choose a smaller number of ranks: no machine has room for more processes."""
        if self._state == "running":
            self._size, self._change = len(self._members), None
            return
        self._size = self._sizes.below(self._present)
        if not self._size:
            self._give_up(f"{self._present} ranks are left: fewer than the run may have")

    # --- transitions --------------------------------------------------------------------------------------------

    def _enter(self, state: Literal["running", "leaving", "forming"]) -> None:
        self._state, self._since = state, time.monotonic()

    def _leave(self, why: str, lost: Sequence[int] = ()) -> None:
        """Let all ranks leave what they wait in."""
        self._change = self._change or Change(time.time())
        if lost and not self._change.lost:
            self._change.reasons.clear()  # what ranks noticed before the loss was known
        self._change.reasons.append(why)
        self._change.lost += lost
        if self._state != "leaving":
            self._forget_steps()
        if self._state != "leaving" or self._change.requested:  # ranks have time from now on, not since the request
            self._enter("leaving")
        self._change.requested = False
        self._aborted.clear()
        for member in self._members:
            if member.key not in self._steps:
                self._processes.send(member, {"abort": why})
        self._check_ended()

    def _forget_steps(self) -> None:
        own = {member.key for member in self._members}
        self._steps = {key: step for key, step in self._steps.items() if key not in own}

    @property
    def unchanged_since(self) -> float:
        """When the ranks began to train in this group, by the monotonic clock; infinity while it changes."""
        return self._since if self.is_settled else math.inf

    @property
    def is_settled(self) -> bool:
        """Whether the ranks train, and none is being added."""
        return self._state == "running" and self._change is None

    def resize(self, size: int, why: str) -> str | None:
        """Change the number of ranks at a step's boundary; return why that is not possible, if so."""
        if refused := self._sizes.refusal(size):
            return refused
        self._sizes.most = size
        if size == len(self._members):
            return None
        self._size = size
        self._change = Change(time.time(), [why], requested=True)
        if size < len(self._members):
            self._ask_to_leave()
            return None
        self._failed_starts = 0
        self._fill()  # new ranks get ready while the others train
        return None if self._size == size else f"no machine has room for {size} ranks."

    def take_arrival(self, node: str, ranks: int, who: str) -> None:
        """Take in ranks of a machine that has arrived, as many as the run can use."""
        self._starting[node] += ranks
        self._grow(f"{who} arrived")

    def _grow(self, why: str) -> None:
        """Let ranks that are there, or get ready, take part as far as the run can use them."""
        most = self._sizes.below(min(self._sizes.most, self._present - self._elastic.spares))
        if most > len(self._members) and self.is_settled:
            self._size = most
            self._change = Change(time.time(), [why], requested=True)
            self._form_if_all_ready()

    def _ask_to_leave(self) -> None:
        assert self._change is not None, "a request is a change"
        self._enter("leaving")
        self._forget_steps()
        for member in self._members:
            self._processes.send(member, {"regroup": self._change.reasons[-1]})

    def _form_if_all_ready(self) -> None:
        able = [state for state in self._spares if state.key in self._steps]
        missing = self._size - len(self._members)
        if self._state == "running":
            if self._change is not None and 0 < missing <= len(able):  # those who were added are ready
                self._ask_to_leave()
            return
        if self._state != "leaving" or any(member.key not in self._steps for member in self._members):
            return
        if missing > len(able):
            return
        step = max((self._steps[member.key] for member in self._members), default=-1)
        self._stuck = self._stuck + 1 if step <= self._last_step else 0
        self._last_step = max(step, self._last_step)
        change = self._change
        if change is not None and not change.lost and not change.requested and self._stuck > _TRIES:
            self._give_up(f"{'; '.join(change.reasons)}; no step was complete since the last {_TRIES} interruptions")
            return
        self._form((self._members + able)[: self._size])

    def _set_aside(self, chosen: list[RankState]) -> None:
        """Let ranks without a place wait, as far as the run may use them; the others end, and free their memory."""
        self._holders &= {member.key for member in self._members}
        rest = [state for state in self._spares + self._members if state not in chosen]
        kept = max(self._elastic.spares, self._sizes.most - self._size)
        self._spares = rest[:kept]
        for state in rest:
            state.dismissed = state not in self._spares
            self._processes.send(state, {"end" if state.dismissed else "wait": True})

    def _form(self, chosen: list[RankState]) -> None:
        self._set_aside(chosen)
        self.generation += 1
        self._joined.clear()
        self._enter("forming")
        change, self._change = self._change or Change(time.time()), None
        nodes = {node: numbered([s for s in chosen if s.node == node]) for node in sorted({s.node for s in chosen})}
        self._members = [state for states in nodes.values() for state in states]
        for rank, state in enumerate(self._members):
            self._steps.pop(state.key, None)
            state.rank, state.local_rank = rank, nodes[state.node].index(state)
            position = {
                "rank": rank,
                "local_rank": state.local_rank,
                "world_size": self._size,
                "local_world_size": len(nodes[state.node]),
                "node_rank": list(nodes).index(state.node),
                "generation": self.generation,
                "failures": self.failures,
                "began": change.began,
                "reason": "; ".join(change.reasons),
                "lost": change.lost,
                **self._processes.address(),
            }
            self._processes.send(state, {"form": position})

    # --- silence ------------------------------------------------------------------------------------------------

    def find_late(self) -> list[RankState]:
        """Return ranks that have not left or joined for long; those of them that make no progress are to be killed."""
        late = time.monotonic() - self._since > patience(self._elastic.silence_seconds)
        if self._state not in ("leaving", "forming") or not late or (self._change and self._change.requested):
            return []
        done = self._steps.keys() if self._state == "leaving" else self._joined
        return [member for member in self._members if member.key not in done]

    def end(self) -> None:
        """Let ranks that wait for the next generation end: there will be none."""
        for state in (*self._spares, *self._members):
            self._processes.send(state, {"end": True})

    @property
    def spares_only(self) -> bool:
        """Whether all members have ended, and only spare ranks are left."""
        return all(member.code is not None for member in self._members)
