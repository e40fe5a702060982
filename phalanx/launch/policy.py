"""What to do after an attempt, decided as data: the supervisor executes it and says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.errors import EXIT_PREEMPTED, EXIT_USAGE

if TYPE_CHECKING:
    from phalanx.launch.failure import Failure


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
