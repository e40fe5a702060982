"""The event loop of every launcher: messages, timers and reminders, what Ctrl-C, SIGTERM and SIGUSR1 do, and restarts.

On the wire a message of the fork server is a JSON object. Its first key is the kind, with the first field
as its value; the other fields follow by their names: `{"exited": "r3", "code": -9, "time": 17.5}` is
`ProcessExited("r3", code=-9, time=17.5)`.
"""

from __future__ import annotations

import selectors
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.errors import EXIT_PREEMPTED, EXIT_USAGE
from phalanx.host.processes import SignalInbox
from phalanx.launch.failure import FailureReport
from phalanx.launch.output import RankConsole
from phalanx.launch.spec import LaunchResult, LaunchSpec


class ProcessStarted(NamedTuple):
    """The fork server has forked a process."""

    key: str
    pid: int


class ProcessExited(NamedTuple):
    """A process of the fork server has ended."""

    key: str
    code: int
    time: float


class ProcessRefused(NamedTuple):
    """The fork server could not fork a process."""

    key: str
    why: str


_KINDS: dict[str, type[Any]] = {
    "started": ProcessStarted,
    "exited": ProcessExited,
    "refused": ProcessRefused,
}


def parse(message: Mapping[str, Any]) -> Any:
    """Return a message as its type."""
    (kind, value), *fields = message.items()
    return _KINDS[kind](value, **dict(fields))


SUCCESS_CODES = (0, EXIT_PREEMPTED)
"""The exit codes of ranks that count as success."""


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended."""

    exit_code: int
    failure: FailureReport | None = None
    interrupted: bool = False
    """Stopped on request: Ctrl-C, SIGTERM or the like."""
    before_start: bool = False
    """Stopped before any rank was started."""
    final: bool = False
    """Whether starting again could not help: this machine has lost the others."""
    failures: int = 0
    """How many failures the run has had so far, those included that it survived in place."""


def ended_well(codes: Sequence[int | None]) -> bool:
    """Whether there were ranks, and all of them ended successfully."""
    return bool(codes) and all(code in SUCCESS_CODES for code in codes)


def stopped(requested: signal.Signals, codes: Sequence[int | None], activity: str) -> Outcome:
    """Return the outcome of a stop on request; `activity`: what went on before any rank had started, else empty.

    Only EXIT_PREEMPTED says that a rank has saved a checkpoint: a script that ended with 0 may have saved nothing.
    """
    if requested != signal.SIGINT and EXIT_PREEMPTED in codes and ended_well(codes):
        return Outcome(EXIT_PREEMPTED, interrupted=True)
    code = 128 + requested
    if not activity:
        return Outcome(code, interrupted=True)
    failure = FailureReport(cause=f"stopped by {requested.name} while {activity}; no rank had started.", exit_code=code)
    return Outcome(code, failure, interrupted=True, before_start=True)


def may_restart(outcome: Outcome, *, failures: int, max_restarts: int) -> bool:
    """Whether to start the whole group again: after a failure that may not happen again, while restarts are left."""
    failed = outcome.failure is not None and not outcome.interrupted and not outcome.final
    # Preempted ranks have saved a checkpoint; a usage error would be the same again.
    return failed and outcome.exit_code not in (EXIT_PREEMPTED, EXIT_USAGE) and failures < max_restarts


class LauncherLoop(ABC):
    """Follows one run to its end in the caller's thread, by callbacks of the selector and timers.

    The first SIGINT, SIGTERM or SIGHUP is passed on to the ranks, which are killed after a grace period, or at a
    second Ctrl-C. SIGUSR1 is only passed on: ranks that handle it leave with a checkpoint.
    """

    def __init__(self, spec: LaunchSpec, console: RankConsole, inbox: SignalInbox) -> None:
        self._spec = spec
        self._console = console
        self._inbox = inbox
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, selectors.EVENT_READ, self._on_signals)
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._requested: signal.Signals | None = None
        """The signal that asked for the end of the run."""

    def _follow(self) -> None:
        while not self._is_over():
            self._wait()
            now = time.monotonic()
            due = [action for deadline, action in self._timers if deadline <= now]
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for action in due:
                action()
            self._check()

    def _wait(self) -> None:
        """Wait for events or the next deadline, and handle them."""
        deadlines = [deadline for deadline, _ in self._timers] + self._deadlines()
        seconds = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self._selector.select(seconds):
            if self._selector.get_map().get(key.fd) is key:  # else what was handled before has closed it
                key.data()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, action))

    def _on_signals(self) -> None:
        for number in self._inbox.take():
            if number == signal.SIGUSR1:
                self._signal_ranks(number)
            elif number == signal.SIGINT and self._is_stopping:
                self._kill_ranks()
            elif self._requested is None:
                self._requested = number
                again = " (Ctrl-C again to kill)" if number == signal.SIGINT else ""
                what = f" the ranks{again}" if self.has_started else ""
                self._console.notice(f"{number.name}: stopping{what}")
                longer = self._spec.interrupt_grace if number == signal.SIGINT else 0.0
                self._stop_ranks(number, max(self._spec.grace_seconds, longer))

    def _stop_ranks(self, number: signal.Signals, grace: float) -> None:
        """Pass a signal on as it came, so that a script's own handlers and `except KeyboardInterrupt` are reached."""
        self._signal_ranks(number)
        self._later(grace, self._kill_ranks)

    # --- what launchers do differently --------------------------------------------------------------------------

    @property
    def has_started(self) -> bool:
        """Whether there may be ranks to stop."""
        return True

    @property
    def _is_stopping(self) -> bool:
        return self._requested is not None

    def _deadlines(self) -> list[float]:
        """Return when `_check` has something to do at the latest, if nothing else happens before."""
        return []

    def _check(self) -> None:  # noqa: B027 - a hook: not every launcher has deadlines
        """Do what depends on the clock; called after every round of events."""

    @abstractmethod
    def _is_over(self) -> bool:
        """Whether there is nothing left to wait for."""

    @abstractmethod
    def _signal_ranks(self, number: int) -> None:
        """Send a signal to all ranks."""

    @abstractmethod
    def _kill_ranks(self) -> None:
        """Kill all ranks."""


def run_attempts(
    spec: LaunchSpec, console: RankConsole, attempt: Callable[[int, int], Outcome]
) -> tuple[Outcome, LaunchResult]:
    """Run attempts, given their numbers and the failures before, until one succeeds or no restart is left."""
    number = failures = 0
    while True:
        outcome = attempt(number, failures)
        failures = max(failures, outcome.failures)
        if not may_restart(outcome, failures=failures, max_restarts=spec.max_restarts):
            return outcome, LaunchResult(outcome.exit_code, number + 1, outcome.failure)
        number += 1
        failures += 1
        console.notice(f"{outcome.failure}\nrestart {failures} of {spec.max_restarts}")


MOMENTS = (30.0, 120.0, 600.0, 1800.0, 3600.0)
"""Seconds after the beginning; after the last of them, once per interval of that length."""


@dataclass
class Reminder:
    """Says for a time whether a notice is due."""

    began: float
    moments: tuple[float, ...] = MOMENTS
    _passed: int = 0

    @property
    def next_moment(self) -> float:
        """When the next notice is due."""
        last = len(self.moments) - 1
        beyond = max(0, self._passed - last)
        return self.began + self.moments[min(self._passed, last)] + beyond * self.moments[last]

    def is_due(self, now: float) -> bool:
        """Return True once per moment; moments that were missed together (a suspended machine) count as one."""
        if now < self.next_moment:
            return False
        while self.next_moment <= now:
            self._passed += 1
        return True


def duration_text(seconds: float) -> str:
    """Write a duration as text: "30 s", "2 min", "1.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
