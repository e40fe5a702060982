"""How an attempt ended, and whether another one follows."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import EXIT_PREEMPTED, EXIT_USAGE
from phalanx.launch.failure import FailureReport

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


def may_restart(outcome: Outcome, *, attempt: int, max_restarts: int) -> bool:
    """Whether to start the whole group again: after a failure that may not happen again, while attempts are left."""
    failed = outcome.failure is not None and not outcome.interrupted
    # Preempted ranks have saved a checkpoint; a usage error would be the same again.
    return failed and outcome.exit_code not in (EXIT_PREEMPTED, EXIT_USAGE) and attempt < max_restarts
