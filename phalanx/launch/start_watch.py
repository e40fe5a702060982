"""Watch the start: who waits in init_process_group, who never came, and whether anything moves at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.launch.spec import LaunchSpec

NOTICE_SECONDS = 30.0
"""When nobody has joined by then, the user is told once where rank 0 is."""


@dataclass(frozen=True)
class Hang:
    """Ranks that keep the others waiting, and for how long these have waited."""

    missing: tuple[int, ...]
    waited: float
    nobody_came: bool = False


@dataclass
class StartWatch:
    """Fed with events and exits, asked with the clock."""

    spec: LaunchSpec
    ranks: tuple[int, ...]
    world_size: int
    started: float
    _rounds: dict[int, int] = field(default_factory=dict)
    _waiting: dict[int, float] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _noticed: bool = False

    def take_event(self, event: dict[str, Any], now: float) -> None:
        """Note a rank entering or leaving init_process_group."""
        rank = event.get("rank")
        if not isinstance(rank, int):
            return
        if event["event"] == "joining":
            self._rounds[rank] = self._rounds.get(rank, 0) + 1
            self._waiting[rank] = now
        elif event["event"] == "joined":
            self._waiting.pop(rank, None)

    def take_exit(self, rank: int) -> None:
        """Note that a rank has ended."""
        self._ended.add(rank)
        self._waiting.pop(rank, None)

    @property
    def quiet(self) -> bool:
        """Whether no rank has reached init_process_group or ended yet."""
        return not self._rounds and not self._ended

    def next_deadline(self) -> float | None:
        """Return when `find_hang` or `wants_notice` may next have something to say."""
        deadlines = []
        if self.spec.join_timeout is not None and self._waiting:
            deadlines.append(min(self._waiting.values()) + self.spec.join_timeout)
        if self.quiet and self.spec.start_timeout is not None:
            deadlines.append(self.started + self.spec.start_timeout)
        if self.quiet and not self._noticed and self.world_size > 1:
            deadlines.append(self.started + NOTICE_SECONDS)
        return min(deadlines, default=None)

    def find_hang(self, now: float) -> Hang | None:
        """Return who is missing once somebody has waited too long, else None."""
        limit = self.spec.start_timeout
        if self.quiet and limit is not None and now >= self.started + limit:
            return Hang(self.ranks, limit, nobody_came=True)
        if self.spec.join_timeout is None or not self._waiting:
            return None
        if now < min(self._waiting.values()) + self.spec.join_timeout:
            return None
        rounds = max(self._rounds.values())
        missing = tuple(rank for rank in self.ranks if self._rounds.get(rank, 0) < rounds)
        return Hang(missing, self.spec.join_timeout)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank that is missing is so because it is over."""
        return rank in self._ended

    def wants_notice(self, now: float) -> bool:
        """Return True once, when nobody has come for a long time."""
        if self._noticed or not self.quiet or self.world_size == 1 or now < self.started + NOTICE_SECONDS:
            return False
        self._noticed = True
        return True
