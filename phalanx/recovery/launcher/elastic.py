"""What an elastic run adds to a launcher: its role, ranks that are stuck, requests for another number of ranks.

`TakingOver` leads the ranks after the machine that decided is lost.
`request_ranks` is for another process (`phalanx runs scale`), which asks by small files in the run's log folder.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.diagnosis import Blame, Diagnosis, Evidence
from phalanx.errors import UsageError
from phalanx.host.files import replace_file
from phalanx.launch.context import Handlers, LauncherContext
from phalanx.launch.group import RankState
from phalanx.launch.watches import Watch
from phalanx.recovery.launcher.leader import LeaderRole
from phalanx.recovery.launcher.roles import MemberRole

_REQUEST, _ANSWER = "ranks.request", "ranks.answer"
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 20.0
_PASS_SECONDS = 2.0
"""After this time the launcher that decides has not taken a request, so it does not see this log folder."""

Role = LeaderRole | MemberRole


class ElasticControl:
    """Decides about lost ranks, or follows the launcher that does; a watch of the attempt."""

    def __init__(self, context: LauncherContext, diagnosis: Diagnosis, failures: int) -> None:
        """`failures`: how many were survived before this attempt."""
        self._context, self._failures_before, self._evidence = context, failures, diagnosis.evidence
        node, evidence = context.node, diagnosis.evidence
        self.role: Role = (
            LeaderRole(context, evidence, failures=failures)
            if node.own == node.leader
            else MemberRole(context, evidence, node.leader)
        )
        self._stall = StallWatch(context, diagnosis)
        self._requests = ScaleRequests(context.spec.log_dir, context.console.notice)
        self._passed: list[tuple[str, int]] = []
        """Machines that have passed on a request, and the numbers of ranks."""
        self._all_ended = False
        self._takeover: TakingOver | None = None
        self._address = ("", 0)
        self._waiting_mail: list[dict[str, Any]] = []

    @property
    def watches(self) -> list[Watch]:
        """What depends on the clock."""
        return [self]

    @property
    def failures(self) -> int:
        """How many failures the run has survived."""
        return self.role.failures

    def listen(self) -> None:
        """Handle messages of the ranks of this machine, which have been started."""
        self.role.listen()

    def on_loss(self, ended: RankState, how: str) -> bool:
        """Replace a rank that has ended with an error; return whether the run goes on."""
        return self.role.take_loss(ended, how)

    def on_end(self, ended: RankState) -> None:
        """Note a rank that has finished."""
        self.role.take_end(ended)

    def end(self) -> None:
        """Let ranks that wait for a place end: the attempt is over."""
        self.role.end()

    @property
    def handlers(self) -> Handlers:
        """By kind, what to do about a message of the store agent."""
        return {"mail": self.take_mail, "lost_nodes": self._take_lost_nodes, "leader": self._take_lost_leader}

    @property
    def next_deadline(self) -> float:
        """When `check` may next have something to do."""
        return self.role.next_deadline

    def check(self, now: float) -> None:
        """Kill ranks that are stopped or stuck, answer requests, and take over when all machines have reported."""
        self._stall.end(self.role.find_silent)
        if isinstance(self.role, MemberRole):
            self._requests.attempt(self._pass_request)
        elif self.role.members.group.is_settled:
            self._requests.attempt(self._answer_requests)
        if self._takeover is not None and self._takeover.is_complete:
            self._lead(self._takeover)
        self._stall.check(self.role)

    def _answer_requests(self) -> None:
        """Carry out requests for another number of ranks, also those that other machines have passed on."""
        assert isinstance(self.role, LeaderRole), "it decides"
        if (wanted := self._requests.take()) is not None:
            self._requests.answer(self._resize(wanted))
        while self._passed:
            node, wanted = self._passed.pop(0)
            self._context.rendezvous.post(node, {"resized": self._resize(wanted)})

    def _resize(self, wanted: int) -> str | None:
        assert isinstance(self.role, LeaderRole), "it decides"
        return self.role.members.resize(wanted, f"a request for {wanted} rank{'s' * (wanted != 1)}")

    def _pass_request(self) -> None:
        """Pass a request on to the launcher that decides, if that one does not see the same log folder."""
        if (wanted := self._requests.take(after=_PASS_SECONDS)) is not None:
            assert isinstance(self.role, MemberRole), "another launcher decides"
            self._context.rendezvous.post(self.role.leader, {"resize": wanted})

    def on_overdue(self) -> None:
        """Kill the rank that others have waited for too long over nccl; report it if it is not of this machine."""
        self._stall.end_late(self.role)

    # --- several machines ---------------------------------------------------------------------------------------

    def take_mail(self, mail: dict[str, Any]) -> None:
        """Take a message of another launcher."""
        if "resize" in mail:
            self._passed.append((mail["sender"], mail["resize"]))
        elif "resized" in mail:
            self._requests.attempt(lambda: self._requests.answer(mail["resized"]))
        elif self._takeover is not None and "hello" in mail:
            self._takeover.take_hello(mail)
        elif self._takeover is not None or ("hello" in mail and not isinstance(self.role, LeaderRole)):
            self._waiting_mail.append(mail)  # before this launcher knows that it takes over
        else:
            self._all_ended = self.role.take_mail(mail) or self._all_ended

    def all_ended(self) -> bool:
        """Whether all machines have ended; called when this one has."""
        return self._all_ended or self.role.all_ended()

    def _take_lost_nodes(self, hosts: dict[str, str]) -> None:
        if isinstance(self.role, LeaderRole):
            self.role.take_lost_nodes(hosts)

    def _take_lost_leader(
        self, leader: str, lost: dict[str, str], address: tuple[str, int] | None = None, others: Sequence[str] = ()
    ) -> None:
        """Follow another launcher after the machine that decided was lost; with an `address` take over."""
        if not isinstance(self.role, MemberRole):
            return
        self._context.console.notice(f"the machine {', '.join(lost.values())}, which decided about the ranks, was lost")
        if address is None:
            self.role.follow(leader)
            return
        self._takeover = TakingOver(self._context, self._evidence, self.role, lost, list(others))
        self._address = address
        self._take_waiting_mail()

    def _lead(self, takeover: TakingOver) -> None:
        self._takeover = None
        self.role = takeover.lead(self._failures_before, self._address)
        self.role.listen()
        self._take_waiting_mail()

    def _take_waiting_mail(self) -> None:
        waiting, self._waiting_mail = self._waiting_mail, []
        for mail in waiting:
            self.take_mail(mail)


class StallWatch:
    """Kills a rank that the others wait for without end, so that it is replaced; only stacks show which one it is."""

    def __init__(self, context: LauncherContext, diagnosis: Diagnosis) -> None:
        assert context.spec.elastic is not None, "only then there is a role"
        self._limit = context.spec.elastic.stall_seconds
        self._group, self._evidence, self._console = context.group, diagnosis.evidence, context.console
        self._inquiry, self._report = diagnosis.inquiry, diagnosis.report
        self._asked = False
        self._ending: set[str] = set()

    def end(self, find: Callable[[], list[RankState]]) -> None:
        """Kill ranks that are stopped, and those that neither leave or join a group nor make progress.

        `find` returns them, and is asked again before a rank is killed: it may have gone on meanwhile.
        """
        silent = find()
        self._group.signal(signal.SIGKILL, [state for state in silent if state.stopped_since is not None])
        stuck = [state for state in silent if state.stopped_since is None and state.key not in self._ending]
        if stuck:
            self._ending |= {state.key for state in stuck}
            self._inquiry.ask_ranks(lambda _: self._kill([state for state in find() if state in stuck]), stuck)

    def _kill(self, stuck: list[RankState]) -> None:
        self._ending.clear()
        for state in stuck:
            where = self._evidence.position(state)
            state.killed_for = f"did not go on after other ranks were lost, and was killed: it was {where}"
        self._group.signal(signal.SIGKILL, stuck)

    def end_late(self, role: Role) -> None:
        """Kill the rank that others have waited for too long over nccl; report it where it is not of this machine."""
        if not self._asked and role.unchanged_since < time.monotonic():
            self._asked = True
            self._inquiry.find_blame(self._kill_blamed)

    def _kill_blamed(self, blame: Blame | None) -> None:
        self._asked = False
        guilty = [state for state in self._group.alive if blame is not None and state.rank == blame.rank]
        if blame is None or not guilty:
            self._report(blame)
            return
        self._evidence.late.clear()
        guilty[0].killed_for = f"{blame.cause}, and was killed"
        self._group.signal(signal.SIGKILL, guilty[:1])

    def check(self, role: Role) -> None:
        """Ask for the stacks where no rank of the group has made progress for long."""
        since = role.unchanged_since
        if self._limit is None or self._asked or time.monotonic() - since < self._limit or not self._is_stalled(role):
            return
        self._asked = True
        self._inquiry.ask_ranks(lambda _: self._judge(role, since), role.members_here)

    def _is_stalled(self, role: Role) -> bool:
        last = self._evidence.last_progress(role.members_here)
        return last is not None and self._limit is not None and time.time() - last >= self._limit

    def _judge(self, role: Role, since: float) -> None:
        self._asked = False
        if role.unchanged_since != since or not self._is_stalled(role):  # meanwhile a rank was replaced, or has gone on
            return
        for state, where in self._evidence.find_stalled(role.members_here):
            waited = f"made no step for {self._limit:g} s while others wait"
            self._console.notice(f"rank {state.rank} {waited}: it is {where}")
            self._group.signal(signal.SIGKILL, [state])


def request_ranks(log_dir: Path, ranks: int) -> None:
    """Ask the launcher of a run for another number of ranks; UsageError where it refuses, or does not answer."""
    answer = log_dir / _ANSWER
    answer.unlink(missing_ok=True)
    replace_file(log_dir / _REQUEST, json.dumps({"ranks": ranks}))
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        while not answer.exists():
            if time.monotonic() > deadline:
                raise UsageError(
                    f"the launcher of {log_dir.parent} did not answer within {_ANSWER_SECONDS:g} s.",
                    hint="Only a run that was started elastic can be resized: --num-workers 2:8, or --max-restarts N.",
                )
            time.sleep(_POLL_SECONDS)
    finally:
        (log_dir / _REQUEST).unlink(missing_ok=True)  # also after Ctrl-C: it must not be carried out later
    refused = json.loads(answer.read_text())["refused"]
    answer.unlink(missing_ok=True)
    if refused:
        raise UsageError(refused)


class ScaleRequests:
    """The requests in a log folder, for its launcher."""

    def __init__(self, log_dir: Path, notice: Callable[[str], None]) -> None:
        self._log_dir, self._notice = log_dir, notice
        self._problem = ""
        self._seen: float | None = None

    def attempt(self, work: Callable[[], None]) -> None:
        """Do something about a request; what goes wrong with the files is reported and ends nothing."""
        try:
            work()
        except OSError as error:  # a full disk, no permission: the run goes on
            problem = f"a request for another number of ranks cannot be read or answered: {error}"
            if problem != self._problem:
                self._notice(problem)
            self._problem = problem

    def take(self, after: float = 0.0) -> int | None:
        """Return the number of ranks that is asked for, and remove the request; None without one.

        `after`: only if it has been there for so many seconds.
        """
        request = self._log_dir / _REQUEST
        try:
            text = request.read_text()
        except FileNotFoundError:
            self._seen = None
            return None
        self._seen = self._seen or time.monotonic()
        if time.monotonic() - self._seen < after:
            return None
        request.unlink(missing_ok=True)
        self._seen = None
        try:
            return int(json.loads(text)["ranks"])
        except (ValueError, KeyError, TypeError):  # not written by `request_ranks`
            return 0

    def answer(self, refused: str | None) -> None:
        """Write why a request is not carried out; None: it is."""
        replace_file(self._log_dir / _ANSWER, json.dumps({"refused": refused}))


_HELLO_SECONDS = 3.0


class TakingOver:
    """Collects the ranks of the machines that are left, and then leads them."""

    def __init__(
        self, context: LauncherContext, evidence: Evidence, before: MemberRole, lost: dict[str, str], others: list[str]
    ) -> None:
        self._context, self._evidence, self._before = context, evidence, before
        self.lost = lost
        self._missing = set(others)
        self._reports = {context.node.own: before.ranks()}
        self._generation, self._failures = before.generation, before.failures
        assert context.spec.elastic is not None, "only then there is a role"
        self.deadline = time.monotonic() + max(_HELLO_SECONDS, context.spec.elastic.silence_seconds)

    def take_hello(self, mail: dict[str, Any]) -> None:
        """Take the report of a machine."""
        self._reports[mail["sender"]] = mail["hello"]
        self._generation = max(self._generation, mail["generation"])
        self._failures = max(self._failures, mail["failures"])
        self._missing.discard(mail["sender"])

    @property
    def is_complete(self) -> bool:
        """Whether all machines have reported, or were waited for long enough."""
        return not self._missing or time.monotonic() > self.deadline

    def lead(self, failures: int, address: tuple[str, int]) -> LeaderRole:
        """Return the role that decides from now on; the ranks of the lost machine are replaced, or left out.

        `failures`: before this attempt; those since then are known from the lost launcher.
        """
        members, ready = [], []
        self._reports[self._context.node.own] = self._before.ranks()  # as it is now
        own = {state.key: state for state in self._context.group.ranks.values()}
        for node, ranks in self._reports.items():
            for each in ranks:
                state = own.get(each["key"]) or RankState(
                    each["rank"], self._context.spec.label(each["slot"]), each["key"], each["slot"], node
                )
                state.node, state.code = node, each["code"]
                state.rank, state.local_rank = each["rank"], each["local_rank"]
                if each["is_member"]:
                    members.append(state)
                if each["ready"] is not None:
                    ready.append((state, each["ready"]))
        known = {state.rank for state in members}
        machine = next(iter(self.lost))
        gone = [
            RankState(rank, f"r{rank}", f"lost-{rank}", rank, machine)
            for rank in range(self._before.size)
            if rank not in known
        ]
        members = sorted([*members, *gone], key=lambda state: state.rank)
        self._context.node = self._context.node.without(set(self.lost) | self._missing)
        failures = max(failures, self._failures)
        parts = (self._context, self._evidence)
        role = LeaderRole(*parts, failures=failures, inherited=members, generation=max(1, self._generation))
        role.move_to(*address)
        role.take_lost_nodes({machine: self.lost[machine]})
        for state, message in ready:
            role.members.take(state, message)
        return role
