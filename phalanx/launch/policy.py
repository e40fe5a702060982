"""What to do after an attempt, decided as data: the supervisor executes it and says why."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.errors import EXIT_PREEMPTED, EXIT_USAGE
from phalanx.launch.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

WELL = (0, EXIT_PREEMPTED)
"""The exit codes of ranks with which nothing is wrong."""


@dataclass(frozen=True)
class Restart:
    """Start the whole group again."""

    why: str


@dataclass(frozen=True)
class Stop:
    """Leave with the attempt's exit code."""

    why: str


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended."""

    exit_code: int
    failure: Failure | None = None
    interrupted: bool = False
    """Stopped on request: Ctrl-C, SIGTERM or the like."""
    before_start: bool = False
    """Stopped when no rank ran yet: none is there to say goodbye."""


def ended_well(codes: Sequence[int | None]) -> bool:
    """Whether there were ranks and all of them left of their own accord."""
    return bool(codes) and all(code in WELL for code in codes)


def stopped(requested: signal.Signals, codes: Sequence[int | None], activity: str) -> Outcome:
    """Return the outcome of a stop on request; `activity` is what went on when no rank ran yet, else empty.

    Only a rank that left with EXIT_PREEMPTED says that it saved: a script that left with 0 may have saved nothing.
    """
    if requested != signal.SIGINT and EXIT_PREEMPTED in codes and ended_well(codes):
        return Outcome(EXIT_PREEMPTED, interrupted=True)
    code = 128 + requested
    if not activity:
        return Outcome(code, interrupted=True)
    failure = Failure(cause=f"stopped by {requested.name} while {activity}; no rank had started.", exit_code=code)
    return Outcome(code, failure, interrupted=True, before_start=True)


def decide(outcome: Outcome, *, attempt: int, max_restarts: int) -> Restart | Stop:
    """Restart after a failure that another try may mend, as long as tries are left."""
    if outcome.interrupted:
        return Stop("stopped on request")
    if outcome.exit_code == EXIT_PREEMPTED:
        return Stop("preempted after a checkpoint")
    if outcome.failure is None:
        return Stop("finished")
    if outcome.exit_code == EXIT_USAGE:
        return Stop("a mistake in what was asked for does not go away by trying again")
    if attempt >= max_restarts:
        return Stop("no restarts left" if max_restarts else "restarts were not asked for")
    return Restart(f"restart {attempt + 1} of {max_restarts}")
