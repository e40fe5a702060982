"""One attempt: gather the nodes, start the ranks, follow them to their end, and return the outcome."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from pathlib import Path
from typing import Any

from phalanx.errors import EXIT_PREEMPTED, EXIT_USAGE, ForkServerDiedError
from phalanx.host.processes import how_it_ended
from phalanx.host.signals import SignalInbox
from phalanx.launch.blame import Blame
from phalanx.launch.diagnosis import Evidence, StallWatch
from phalanx.launch.environment import NodeInfo
from phalanx.launch.failure import YIELD_SECONDS, FailureReport
from phalanx.launch.forkserver.client import Session
from phalanx.launch.group import RankGroup, RankState
from phalanx.launch.inquiry import Inquiry, StallNotice
from phalanx.launch.launcher_loop import SUCCESS_CODES, LauncherLoop, Outcome, ended_well, stopped
from phalanx.launch.leader import LeaderRole
from phalanx.launch.output import RankConsole
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.resize import Requests
from phalanx.launch.roles import LauncherContext, MemberRole
from phalanx.launch.spec import LaunchSpec
from phalanx.launch.startup_watch import StartupNotices, StartWatch
from phalanx.launch.takeover import TakingOver

_FAILURE_GRACE = 1.0
_REMOTE_SECONDS = 2.5
"""How much longer a lost connection is not taken for the cause with several nodes: until a lost node is known."""
_KILL_SECONDS = 5.0


class Attempt(LauncherLoop):
    """Runs once."""

    def __init__(
        self,
        spec: LaunchSpec,
        console: RankConsole,
        session: Session,
        rendezvous: Rendezvous,
        inbox: SignalInbox,
        number: int,
        scratch: Path,
        failures: int = 0,
    ) -> None:
        """`scratch`: a folder for what ranks would leave in the temporary folder when they are killed.

        `failures`: how many were survived before, of at most `max_restarts`.
        """
        super().__init__(spec, console, inbox)
        self._session = session
        self._rendezvous = rendezvous
        self._number = number
        self._scratch = scratch
        self._failures_before = failures
        self._role: LeaderRole | MemberRole | None = None
        self._takeover: TakingOver | None = None
        self._waiting_mail: list[dict[str, Any]] = []
        self._requests = Requests(spec.log_dir, console.notice)
        self._group: RankGroup | None = None
        self._watch: StartWatch | None = None
        self._notices = StartupNotices(spec, time.monotonic(), serving=session.server.is_serving)
        self._evidence: Evidence | None = None
        self._inquiry: Inquiry | None = None
        self._stall_notice: StallNotice | None = None
        self._silent_nodes: list[str] = []
        self._failure: FailureReport | None = None
        self._blaming = False
        self._diagnosing = False
        self._published_end = self._killing = False
        self._all_ended = self._final = False

    def run(self, shared_env: dict[str, str]) -> Outcome:
        """Follow the attempt to its end."""
        self._shared_env = {**shared_env, "PHALANX_FAILURES": str(self._failures_before)}
        self._selector.register(self._session, selectors.EVENT_READ, self._take_session)
        try:
            node = self._rendezvous.begin(self._number)
            if node is not None:
                self._start(node)
            elif self._rendezvous.agent is not None:
                self._selector.register(self._rendezvous.agent, selectors.EVENT_READ, self._take_rendezvous)
            self._follow()
        except ForkServerDiedError:
            # A signal to the whole process group ends the fork server as well.
            self._take_signals()
            if not self._is_stopping:
                raise
        finally:
            if self._group is not None:
                self._group.close(self._selector, failed=self._is_stopping)
            if self._evidence is not None:
                self._evidence.close()
            self._selector.close()
        return self._outcome()

    def _start(self, node: NodeInfo) -> None:
        self._notices.take_gathered(time.monotonic())
        try:
            self._evidence = Evidence(self._spec, node)
        except OSError as error:
            self._fail(FailureReport(cause=f"{self._spec.log_dir} cannot be written: {error.strerror}.", exit_code=1))
            return
        self._group = RankGroup(self._spec, node, self._session, self._console)
        ranks = tuple(state.rank for state in self._group.ranks.values())
        self._evidence.clear(ranks, self._number)
        self._watch = StartWatch(self._spec, ranks, node.world_size)
        self._inquiry = Inquiry(node, self._group, self._evidence, self._rendezvous, self._later)
        parts = (self._group, self._evidence, self._inquiry, self._console)
        self._stall_notice = StallNotice(self._spec, node, *parts)
        self._group.on_event = self._take_event
        self._group.start(self._number, self._shared_env, self._selector, self._scratch)
        if self._spec.elastic is not None:
            watched = (self._group, self._evidence, self._inquiry.ask_ranks, self._console)
            self._stall_watch = StallWatch(self._spec.elastic, *watched)
            self._take_role(node)

    def _take_role(self, node: NodeInfo) -> None:
        """Decide about lost ranks, or follow the launcher that does."""
        assert self._group is not None, "started before"
        assert self._evidence is not None, "started before"
        parts = (self._group, node, self._selector, self._later, self._console.handle, self._rendezvous.post)
        self._context = LauncherContext(self._spec, *parts, self._fail, self._evidence.is_stuck)
        if node.own == node.leader:
            self._role = LeaderRole(self._context, failures=self._failures_before)
        else:
            self._role = MemberRole(self._context, node.leader)

    @property
    def has_started(self) -> bool:
        """Whether the fork server has reported that a rank was forked or refused."""
        return self._group is not None and self._group.has_started

    # --- what arrives -------------------------------------------------------------------------------------------

    def _take_session(self) -> None:
        message = self._session.receive()
        now = time.monotonic()
        self._notices.take_serving(now)
        if self._rendezvous.agent_key and message.get("exited") == self._rendezvous.agent_key:
            cause = f"the process that hosts the ranks' store {how_it_ended(message['code'])}."
            self._fail(FailureReport(cause=cause, exit_code=1))
        if self._group is None or self._watch is None:
            return
        ended = self._group.take_message(message)
        if self.has_started:
            self._notices.end()
        if ended is not None:
            self._watch.take_exit(ended.slot, now)
            self._assess(ended)
        elif (started := self._group.ranks.get(message.get("started", ""))) is not None:
            self._watch.take_start(started.slot, now)

    def _take_event(self, event: dict[str, Any]) -> None:
        assert self._watch is not None
        self._watch.take_event(event, time.monotonic())
        self._console.handle(event)
        if event.get("action") == "exclude" and isinstance(self._role, LeaderRole):
            self._role.members.exclude(event["ranks"])
        elif event["event"] == "overdue":
            self._take_late(event)

    def _take_rendezvous(self) -> None:
        message = self._rendezvous.receive()
        if message is None:
            assert self._rendezvous.agent is not None
            self._selector.unregister(self._rendezvous.agent)
        elif message.get("attempt", self._number) != self._number:
            return  # a message about an earlier attempt
        elif "arrived" in message:
            self._notices.take_arrived(message["arrived"], time.monotonic())
        elif "node" in message:
            self._start(NodeInfo(**message["node"]))
        elif "remote_failure" in message:
            # This node may have failed at the same time; the store keeps the first failure.
            self._failure = FailureReport.from_message(message["remote_failure"])
            if self._failure.rank is None:  # the cause may be here: keep where the ranks are
                self._signal_ranks(signal.SIGQUIT)
            self._stop_ranks(signal.SIGTERM, _FAILURE_GRACE)
        elif "mail" in message:
            self._take_mail(message["mail"])
        elif "lost_nodes" in message and isinstance(self._role, LeaderRole):
            self._role.take_lost_nodes(message["lost_nodes"])
        elif "leader" in message and isinstance(self._role, MemberRole):
            self._take_leader(message)
        elif "question" in message and self._inquiry is not None:
            self._inquiry.take_question(message["question"], own=message["own"])
        elif "answer" in message and self._inquiry is not None:
            self._inquiry.take_answer(message["answer"])
        elif "silent_nodes" in message:
            self._silent_nodes = message["silent_nodes"]
        elif "all_ended" in message:
            self._all_ended = True
        elif "error" in message:
            code = EXIT_USAGE if message["usage"] else 1
            # The agent has ended, and with it this machine's connection to the others.
            self._fail(FailureReport(cause=message["error"], hint=message["hint"], exit_code=code), final=True)

    def _take_mail(self, mail: dict[str, Any]) -> None:
        if self._takeover is not None and "hello" in mail:
            self._takeover.take_hello(mail)
        elif self._takeover is not None or ("hello" in mail and not isinstance(self._role, LeaderRole)):
            self._waiting_mail.append(mail)  # before this launcher knows that it takes over
        elif self._role is not None and self._role.take_mail(mail):
            self._all_ended = True

    def _take_leader(self, message: dict[str, Any]) -> None:
        """Follow another launcher, or take over, after the machine that decided was lost."""
        assert isinstance(self._role, MemberRole)
        names = ", ".join(message["lost"].values())
        self._console.notice(f"the machine {names}, which decided about the ranks, was lost")
        if "address" not in message:
            self._role.follow(message["leader"])
            return
        self._takeover = TakingOver(self._context, self._role, message["lost"], message["others"])
        self._address = message["address"]
        self._take_waiting_mail()

    def _lead(self) -> None:
        takeover, self._takeover = self._takeover, None
        assert takeover is not None, "called while taking over"
        self._role = takeover.lead(self._failures_before, self._address)
        self._take_waiting_mail()

    def _take_waiting_mail(self) -> None:
        waiting, self._waiting_mail = self._waiting_mail, []
        for mail in waiting:
            self._take_mail(mail)

    def _take_signals(self) -> None:
        super()._take_signals()
        if self._inbox.take_resize() and self._group is not None:
            self._group.resize()

    # --- what follows from it -----------------------------------------------------------------------------------

    def _assess(self, ended: RankState) -> None:
        """Look for the cause: at once after a real error, a little later after a rank that only lost its peers."""
        if ended.code in SUCCESS_CODES and self._role is not None:
            self._role.take_end(ended)
        if ended.code in SUCCESS_CODES or (self._is_stopping and not self._is_lost_while_saving(ended)):
            return
        assert self._evidence is not None
        if self._role is not None and self._role.take_loss(ended, self._evidence.describe(ended)):
            return
        if self._is_stopping:
            return
        aborted = ended.code == -signal.SIGABRT  # its last words, which say why, may still be in its pipe
        if not aborted and not self._evidence.of(ended).lost_peer:
            self._blame()
        else:
            self._blame_soon()

    def _blame_soon(self) -> None:
        if not self._blaming:
            self._blaming = True
            self._later(YIELD_SECONDS + (_REMOTE_SECONDS if self._rendezvous.has_other_nodes else 0.0), self._blame)

    def _take_late(self, event: dict[str, Any]) -> None:
        """Compare what all ranks have called: one has waited too long over nccl, which raises no error."""
        assert self._evidence is not None
        self._evidence.note_late(event["rank"], event["text"])
        if self._role is None:
            self._blame_soon()
        elif self._inquiry is not None and not self._is_stopping:
            self._stall_watch.end_late(self._role, self._inquiry.find_blame, self._report)

    def _is_lost_while_saving(self, ended: RankState) -> bool:
        """Whether a rank was killed after the run was asked to stop, so that the others need one to save with."""
        number = -(ended.code or 0)
        return self._failure is None and not self._killing and number > 0 and number != self._requested

    def _blame(self) -> None:
        if self._is_stopping or self._group is None or self._diagnosing:
            return
        assert self._evidence is not None
        assert self._inquiry is not None
        if not self._evidence.only_waited(self._states()):
            self._fail(self._evidence.find_failure(self._states()))
        else:  # compare what all ranks have called, and where they are
            self._diagnosing = self._blaming = True
            self._inquiry.find_blame(self._report)

    def _report(self, blame: Blame | None) -> None:
        assert self._evidence is not None
        assert self._stall_notice is not None
        nodes = self._silent_nodes if self._rendezvous.has_other_nodes else None
        self._fail(self._evidence.explain_waiting(self._states(), blame or self._stall_notice.blame, nodes))

    def _states(self) -> list[RankState]:
        return [] if self._group is None else list(self._group.ranks.values())

    def _fail(self, failure: FailureReport, *, final: bool = False) -> None:
        """Stop the ranks. `final`: this machine alone ends, and does not start again."""
        if self._is_stopping:
            return
        self._failure, self._final = failure, final
        if not final:
            self._rendezvous.publish_failure(failure)
        if self._role is not None:
            self._role.end()
        self._stop_ranks(signal.SIGTERM, _FAILURE_GRACE)

    def _stop_ranks(self, number: signal.Signals, grace: float) -> None:
        self._session.server.wake()
        super()._stop_ranks(number, grace)

    def _kill_ranks(self) -> None:
        self._killing = True
        self._signal_ranks(signal.SIGKILL)
        self._later(_KILL_SECONDS, self._kill_directly)

    def _kill_directly(self) -> None:
        """Kill the remaining ranks directly: the fork server, which should have killed them, has not answered."""
        if self._group is not None and self._group.alive:
            self._group.kill_directly()
            self._session.server.kill()

    def _signal_ranks(self, number: int) -> None:
        if self._group is not None:
            self._group.signal(number)

    @property
    def _is_stopping(self) -> bool:
        return self._requested is not None or self._failure is not None

    def _deadlines(self) -> list[float]:
        if self._diagnosing or self._is_stopping:
            return []
        role = None if self._role is None else self._role.next_deadline
        stall = None if self._stall_notice is None else self._stall_notice.next_deadline
        watch = None if self._watch is None else self._watch.next_deadline()
        return [each for each in (self._notices.next_deadline, watch, role, stall) if each is not None]

    def _check(self) -> None:
        """Name the rank that the others wait for; while nothing happens for long, report where rank 0 is."""
        if self._diagnosing or self._is_stopping:
            return
        now = time.monotonic()
        if (notice := self._notices.take_notice(now)) is not None:
            self._console.notice(notice)
        watch, inquiry = self._watch, self._inquiry
        if watch is None or inquiry is None:
            return
        if self._role is not None:
            self._stall_watch.end(self._role.find_silent)
            if isinstance(self._role, LeaderRole) and self._role.members.group.is_settled:
                self._requests.answer(self._role.members.resize)
            if self._takeover is not None and self._takeover.is_complete:
                self._lead()
            self._stall_watch.check(self._role)
        if self._stall_notice is not None:
            self._stall_notice.check(now)
        if (hang := watch.find_hang(now)) is not None:
            self._diagnosing = True
            inquiry.name_missing(hang, self._fail)
        elif watch.wants_notice(now):
            inquiry.describe_start(watch, self._console.notice)

    # --- the end ------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self._group is None:
            return self._is_stopping
        if self._requested is not None and not self.has_started:
            return True
        if self._group.alive:
            return False
        if self._role is not None and self._rendezvous.has_other_nodes:
            return self._is_stopping or self._all_ended or self._role.all_ended()
        if not self._rendezvous.has_other_nodes and not ended_well([state.code for state in self._states()]):
            # No rank is left that could bring a better cause, or answer with its stack.
            self._diagnosing = False
            self._blame()
        if self._is_stopping or not self._rendezvous.has_other_nodes:
            return True
        if not self._published_end and not self._blaming:
            self._published_end = True
            self._rendezvous.publish_end()
        return self._all_ended

    def _outcome(self) -> Outcome:
        codes = [state.code for state in self._states()]
        survived = max(self._failures_before, self._role.failures if self._role is not None else 0)
        if self._failure is not None:
            facts = {"interrupted": self._requested is not None, "final": self._final}
            return Outcome(self._failure.exit_code, self._failure, failures=survived, **facts)
        if self._requested is None:
            return Outcome(EXIT_PREEMPTED if EXIT_PREEMPTED in codes else 0)
        outcome = stopped(self._requested, codes, "" if self.has_started else self._notices.activity)
        if not ended_well(codes):
            cause = f"{socket.gethostname()} was stopped ({self._requested.name})."
            self._rendezvous.publish_failure(FailureReport(cause=cause, exit_code=outcome.exit_code))
        return outcome
