"""What follows from a lost rank, as data: go on with another one in its place, with fewer ranks, or start again.

`decide` reads plain facts and returns a `Decision`; `membership` executes it, and reports why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from phalanx.errors import EXIT_USAGE

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_PATIENCE = 6.0
"""Multiplier on `silence_seconds` for ranks that may be in a long step."""
_LEAST_PATIENCE = 30.0
"""Seconds, also where heartbeats are expected more often."""
_MANY_FAILURES = 4
RECENT_SECONDS = 3600.0
"""How long a failure of a node's ranks counts where nodes are compared."""


@dataclass(frozen=True)
class Decision:
    """What to do about lost ranks. `size`: with how many ranks the run goes on; `pause`: seconds to wait before."""

    kind: Literal["replace", "shrink", "give_up"]
    size: int
    why: str
    pause: float = 0.0


class Sizes:
    """The numbers of ranks that a run may have."""

    def __init__(self, allowed: Sequence[int]) -> None:
        """`allowed`: the largest first."""
        self.allowed = allowed
        self.most = allowed[0]
        """The most ranks that the run shall have: as many as it may, unless fewer were requested."""
        self._fixed = ""

    def fix(self, size: int, why: str) -> None:
        """Keep a number of ranks from now on; `why`: a sentence for who requests another."""
        if why and not self._fixed:
            self._fixed, self.allowed, self.most = why, (size,), size

    def below(self, ranks: int) -> int:
        """Return the largest allowed number up to `ranks`; 0 where there is none."""
        return next((size for size in self.allowed if size <= ranks), 0)

    def refusal(self, size: int) -> str | None:
        """Return why a number is not possible, if so."""
        if size in self.allowed:
            return None
        allowed = ", ".join(str(number) for number in sorted(self.allowed))
        return f"{size} ranks are not possible here. Possible: {allowed}. {self._fixed}".strip()


@dataclass
class Change:
    """Why the group changes, for the event that reports it."""

    began: float
    reasons: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    requested: bool = False
    """Whether the ranks leave at a step's boundary, which may take long, and not because of an error."""

    def after(self, earlier: Change | None) -> Change:
        """Return this change with an earlier one that no step has followed: both interrupted the run as one."""
        if earlier is None:
            return self
        return Change(earlier.began, [*earlier.reasons, *self.reasons], [*earlier.lost, *self.lost])


@dataclass(frozen=True)
class Facts:
    """What a decision depends on."""

    lost: Sequence[int]
    """The exit codes of the lost ranks."""
    present: int
    """Ranks that hold the state of the run and can go on."""
    spares: int
    """Ranks that wait to take over, with or without a state."""
    size: int
    """Ranks of the group before the loss."""
    sizes: Sequence[int]
    """Numbers of ranks that the strategy can train with, the largest first."""
    ended: int
    """Ranks that have finished: they cannot take part again."""
    failures: int
    """Losses so far, this one included."""
    max_restarts: int
    without_progress: int = 0
    """Losses one after another without a step between them."""
    missing: int = 1
    """Ranks that were lost."""
    replaceable: bool = True
    """Whether new ranks can be started where they were lost; not where a node was lost."""


def decide(facts: Facts) -> Decision:
    """Return what to do: replace lost ranks while restarts are left, then go on with fewer, else give up."""
    if EXIT_USAGE in facts.lost:
        return Decision("give_up", 0, "the error would be the same again")
    if facts.ended:
        return Decision("give_up", 0, "other ranks have finished already")
    if facts.present == 0:
        return Decision("give_up", 0, "no rank is left that holds the state")
    able = facts.replaceable or facts.spares >= facts.missing
    if facts.failures <= facts.max_restarts and able:
        used = f"failure {facts.failures} of at most {facts.max_restarts}"
        return Decision("replace", facts.size, used, pause(facts.without_progress))
    smaller = next((size for size in facts.sizes if size <= facts.present), 0)
    if smaller:
        left = f"{facts.present} rank{'s' * (facts.present > 1)} left"
        return Decision("shrink", smaller, left if able is False else f"{left}, and max_restarts is used up")
    if not able:
        return Decision("give_up", 0, f"{facts.present} ranks are left: fewer than the run may have")
    return Decision("give_up", 0, f"max_restarts = {facts.max_restarts} is used up")


def patience(silence_seconds: float) -> float:
    """Return the seconds without progress after which a rank that does not leave or join is killed."""
    return max(_LEAST_PATIENCE, _PATIENCE * silence_seconds)


def fails_too_often(failures: int, failures_elsewhere: Sequence[int]) -> bool:
    """Whether a node is left out of the run, by the recent failures of its ranks and of each other node's.

    Where all nodes lose ranks, the cause is not one of them.
    """
    usual = sum(failures_elsewhere) / len(failures_elsewhere) if failures_elsewhere else float("inf")
    return failures >= _MANY_FAILURES * (1 + 2 * usual)


def pause(without_progress: int) -> float:
    """Return how long to wait before the next try: nothing at first, then twice as long after each loss."""
    if without_progress < 2:
        return 0.0
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * float(2 ** (without_progress - 2)))
