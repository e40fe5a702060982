"""The event loop under every launcher: timers, restarts, and what Ctrl-C, SIGTERM and SIGUSR1 mean for a run."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable

from phalanx.host.signals import SignalInbox
from phalanx.launch.output import RankConsole
from phalanx.launch.policy import Outcome, may_restart
from phalanx.launch.spec import LaunchResult, LaunchSpec


class Follower:
    """Follows one run to its end in the caller's thread. What happens arrives as a callback of the selector or a timer.

    The first SIGINT, SIGTERM or SIGHUP is passed on to the ranks, which are killed after a grace period, or at a
    second Ctrl-C. SIGUSR1 is passed on and nothing else: ranks that know it leave with a checkpoint.
    """

    def __init__(self, spec: LaunchSpec, console: RankConsole, inbox: SignalInbox) -> None:
        self._spec = spec
        self._console = console
        self._inbox = inbox
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, selectors.EVENT_READ, self._take_signals)
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
            key.data()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, action))

    def _take_signals(self) -> None:
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
                self._stop_ranks(number, self._spec.grace_seconds)

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

    def _check(self) -> None:
        """Do what depends on the clock; called after every round of events."""

    def _is_over(self) -> bool:
        raise NotImplementedError

    def _signal_ranks(self, number: int) -> None:
        raise NotImplementedError

    def _kill_ranks(self) -> None:
        raise NotImplementedError


def run_attempts(
    spec: LaunchSpec, console: RankConsole, attempt: Callable[[int], Outcome]
) -> tuple[Outcome, LaunchResult]:
    """Run attempts, given their numbers, until one succeeds or none is left."""
    number = 0
    while True:
        outcome = attempt(number)
        if not may_restart(outcome, attempt=number, max_restarts=spec.max_restarts):
            return outcome, LaunchResult(outcome.exit_code, number + 1, outcome.failure)
        number += 1
        console.notice(f"{outcome.failure}\nrestart {number} of {spec.max_restarts}")
