"""One attempt: gather the nodes, start the ranks, follow them to their end, and return the outcome."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.errors import EXIT_PREEMPTED, EXIT_USAGE, ForkServerDiedError
from phalanx.features import feature
from phalanx.host.processes import SignalInbox, how_it_ended
from phalanx.launch.agent_messages import AllEnded, Arrived, News, Refused, RemoteFailure
from phalanx.launch.context import FailureSearch, Handlers, LauncherContext, Recovery
from phalanx.launch.environment import NodeInfo
from phalanx.launch.failure import FailureReport
from phalanx.launch.forkserver.client import Session
from phalanx.launch.group import RankGroup, RankState
from phalanx.launch.launcher_loop import (
    SUCCESS_CODES,
    LauncherLoop,
    Outcome,
    ProcessExited,
    ProcessRefused,
    ProcessStarted,
    ended_well,
    parse,
    stopped,
)
from phalanx.launch.output import RankConsole
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.spec import LaunchSpec
from phalanx.launch.watches import StartupNotices, StartWatch, Watch

_FAILURE_GRACE = 1.0
_KILL_SECONDS = 5.0
_FULL_SECONDS = 0.005
"""How long to wait while the store agent has no room for messages."""


class _RunningRanks:
    """The ranks of this node, once all nodes are there, and what looks after them."""

    def __init__(self, context: LauncherContext, number: int, failures: int) -> None:
        self.group, self._context = context.group, context
        self.diagnosis: FailureSearch = feature("diagnosis").Diagnosis(context, number)
        self.recovery: Recovery | None = None
        if context.spec.elastic is not None:
            self.recovery = feature("recovery").ElasticControl(context, self.diagnosis, failures)
        ranks = tuple(state.rank for state in self.group.states)
        texts = (self.diagnosis.name_missing, self.diagnosis.describe_start)
        self._start_watch = StartWatch(context.spec, ranks, context.node.world_size, *texts)
        self.group.on_event = self._on_event

    @property
    def watches(self) -> list[Watch]:
        """What depends on the clock."""
        recovery = [] if self.recovery is None else self.recovery.watches
        return [*recovery, *self.diagnosis.watches, self._start_watch]

    @property
    def handlers(self) -> Handlers:
        """By kind, what to do about a message of the store agent."""
        return {**self.diagnosis.handlers, **({} if self.recovery is None else self.recovery.handlers)}

    def on_message(self, message: ProcessStarted | ProcessExited | ProcessRefused, now: float) -> RankState | None:
        """Take a message of the fork server; return the rank that has just ended, if one has."""
        state = self.group.on_message(message)
        if state is None:
            return None
        self._start_watch.on_process(state, now)
        return None if state.alive else state

    def _on_event(self, event: dict[str, Any]) -> None:
        self._start_watch.on_event(event, time.monotonic())
        self._context.console.handle(event)
        if event["event"] == "overdue":  # over nccl a rank that waits too long raises no error
            self.diagnosis.note_late(event["rank"], event["text"])
            if self.recovery is None:
                self.diagnosis.find_soon()
            elif not self._context.is_stopping():
                self.recovery.on_overdue()


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
        self._session, self._rendezvous = session, rendezvous
        self._number, self._scratch, self._failures_before = number, scratch, failures
        self._running: _RunningRanks | None = None
        self._failure: FailureReport | None = None
        self._published_end = self._killing = self._all_ended = self._final = False
        self._notices = StartupNotices(spec, time.monotonic(), console.notice, serving=session.server.is_serving)
        self._watches: list[Watch] = [self._notices]
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrived: lambda message: self._notices.on_arrived(message.nodes, time.monotonic()),
            NodeInfo: self._start,
            RemoteFailure: self._on_remote_failure,
            AllEnded: self._on_all_ended,
            Refused: self._on_refused,
        }
        """By kind, what to do about a message of the store agent; those about running ranks are added with these."""

    def run(self, shared_env: dict[str, str]) -> Outcome:
        """Follow the attempt to its end."""
        self._shared_env = {**shared_env, "PHALANX_FAILURES": str(self._failures_before)}
        self._selector.register(self._session, selectors.EVENT_READ, self._on_process)
        try:
            node = self._rendezvous.begin(self._number)
            if node is not None:
                self._start(node)
            elif self._rendezvous.agent is not None:
                self._selector.register(self._rendezvous.agent, selectors.EVENT_READ, self._on_rendezvous)
            self._follow()
        except ForkServerDiedError:
            # A signal to the whole process group ends the fork server as well.
            self._on_signals()
            if not self._is_stopping:
                raise
        finally:
            if self._running is not None:
                self._running.group.close(self._selector, failed=self._is_stopping)
                self._running.diagnosis.close()
            self._selector.close()
        return self._outcome()

    def _start(self, node: NodeInfo) -> None:
        self._notices.on_gathered(time.monotonic())
        group = RankGroup(self._spec, node, self._session, self._console)
        parts = (self._console, self._rendezvous, self._selector, self._later, self._fail)
        context = LauncherContext(self._spec, node, group, *parts, lambda: self._is_stopping)
        try:
            self._running = _RunningRanks(context, self._number, self._failures_before)
        except OSError as error:
            self._fail(FailureReport(cause=f"{self._spec.log_dir} cannot be written: {error.strerror}.", exit_code=1))
            return
        self._watches += self._running.watches
        self._handlers |= self._running.handlers
        group.start(self._number, self._shared_env, self._selector, self._scratch)
        if self._running.recovery is not None:
            self._running.recovery.listen()

    @property
    def has_started(self) -> bool:
        """Whether the fork server has reported that a rank was forked or refused."""
        return self._running is not None and self._running.group.has_started

    # --- what arrives -------------------------------------------------------------------------------------------

    def _on_rendezvous(self) -> None:
        message = self._rendezvous.receive()
        if message is None:
            assert self._rendezvous.agent is not None
            self._selector.unregister(self._rendezvous.agent)
        elif not isinstance(message, News):
            self._handlers[type(message)](message)
        elif message.attempt == self._number and (handler := self._handlers.get(type(message.message))) is not None:
            handler(message.message)

    def _on_process(self) -> None:
        message: ProcessStarted | ProcessExited | ProcessRefused = parse(self._session.receive())
        now = time.monotonic()
        self._notices.on_serving(now)
        if isinstance(message, ProcessExited) and message.key == self._rendezvous.agent_key:
            cause = f"the process that hosts the ranks' store {how_it_ended(message.code)}."
            self._fail(FailureReport(cause=cause, exit_code=1))
        if self._running is None:
            return
        ended = self._running.on_message(message, now)
        if self.has_started:
            self._notices.end()
        if ended is not None:
            self._assess(self._running, ended)

    def _on_remote_failure(self, message: RemoteFailure) -> None:
        # This node may have failed at the same time; the store keeps the first failure.
        self._failure = FailureReport.from_message(message.failure)
        if self._failure.rank is None:  # the cause may be here: keep where the ranks are
            self._signal_ranks(signal.SIGQUIT)
        self._stop_ranks(signal.SIGTERM, _FAILURE_GRACE)

    def _on_all_ended(self, _: AllEnded) -> None:
        self._all_ended = True

    def _on_refused(self, message: Refused) -> None:
        """Stop: the agent has ended, and with it this node's connection to the others."""
        code = EXIT_USAGE if message.usage else 1
        self._fail(FailureReport(cause=message.cause, hint=message.hint, exit_code=code), final=True)

    def _on_signals(self) -> None:
        super()._on_signals()
        if self._inbox.take_resize() and self._running is not None:
            self._running.group.resize()

    # --- what follows from it -----------------------------------------------------------------------------------

    def _assess(self, running: _RunningRanks, ended: RankState) -> None:
        """Replace a rank that has ended, or look for the cause."""
        recovery = running.recovery
        if ended.code in SUCCESS_CODES:
            if recovery is not None:
                recovery.on_end(ended)
            return
        if self._is_stopping and not self._is_lost_while_saving(ended):
            return
        survived = recovery is not None and recovery.on_loss(ended, running.diagnosis.describe(ended))
        if not survived and not self._is_stopping:
            running.diagnosis.assess(ended)

    def _is_lost_while_saving(self, ended: RankState) -> bool:
        """Whether a rank was killed after the run was asked to stop, so that the others need one to save with."""
        number = -(ended.code or 0)
        return self._failure is None and not self._killing and number > 0 and number != self._requested

    def _fail(self, failure: FailureReport, *, final: bool = False) -> None:
        """Stop the ranks. `final`: this node alone ends, and does not start again."""
        if self._is_stopping:
            return
        self._failure, self._final = failure, final
        if not final:
            self._rendezvous.publish_failure(failure)
        if self._running is not None and self._running.recovery is not None:
            self._running.recovery.end()
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
        if self._running is not None and self._running.group.alive:
            self._running.group.kill_directly()
            self._session.server.kill()

    def _signal_ranks(self, number: int) -> None:
        if self._running is not None:
            self._running.group.signal(number)

    @property
    def _is_stopping(self) -> bool:
        return self._requested is not None or self._failure is not None

    @property
    def _is_watching(self) -> bool:
        return not self._is_stopping and not (self._running is not None and self._running.diagnosis.is_asking)

    def _deadlines(self) -> list[float]:
        deadlines = [watch.next_deadline for watch in self._watches] if self._is_watching else []
        if self._rendezvous.has_unsent:
            deadlines.append(time.monotonic() + _FULL_SECONDS)
        return [deadline for deadline in deadlines if deadline is not None]

    def _check(self) -> None:
        now = time.monotonic()
        self._rendezvous.flush()
        for watch in self._watches:
            if self._is_watching:
                watch.check(now)

    # --- the end ------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        running, others = self._running, self._rendezvous.has_other_nodes
        if running is None:
            return self._is_stopping
        if self._requested is not None and not self.has_started:
            return True
        if running.group.alive:
            return False
        if running.recovery is not None and others:
            return self._is_stopping or self._all_ended or running.recovery.all_ended()
        if not others and not ended_well(self._codes):
            # No rank is left that could bring a better cause, or answer with its stack.
            running.diagnosis.is_asking = False
            running.diagnosis.find()
        if self._is_stopping or not others:
            return True
        if not self._published_end and not running.diagnosis.is_pending:
            self._published_end = True
            self._rendezvous.publish_end()
        return self._all_ended

    @property
    def _codes(self) -> list[int | None]:
        return [] if self._running is None else [state.code for state in self._running.group.ranks.values()]

    def _outcome(self) -> Outcome:
        recovery = None if self._running is None else self._running.recovery
        survived = max(self._failures_before, 0 if recovery is None else recovery.failures)
        if self._failure is not None:
            facts = {"interrupted": self._requested is not None, "final": self._final}
            return Outcome(self._failure.exit_code, self._failure, failures=survived, **facts)
        if self._requested is None:
            return Outcome(EXIT_PREEMPTED if EXIT_PREEMPTED in self._codes else 0)
        outcome = stopped(self._requested, self._codes, "" if self.has_started else self._notices.activity)
        if not ended_well(self._codes):
            cause = f"{socket.gethostname()} was stopped ({self._requested.name})."
            self._rendezvous.publish_failure(FailureReport(cause=cause, exit_code=outcome.exit_code))
        return outcome
