"""How fast a run goes, and when it will be done."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Estimates the remaining time from the first step or batch that was seen: what came before it was start-up."""

    def __init__(self, done: int, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`done`: how many were done at the beginning, of `total` where that is known."""
        self.total = total
        self._clock = clock
        self._began = clock()
        self._before = done
        self._first: tuple[float, int] | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    def remaining(self, done: int) -> float | None:
        """Return the seconds that are left when `done` are done; None where nothing can be said yet."""
        now = self._clock()
        if self._first is None and done > self._before:
            self._first = (now, done)
        if self.total is None or self._first is None:
            return None
        since, count = now - self._first[0], done - self._first[1]
        if count <= 0:  # only the first is done: it counts although it has the start-up in it
            since, count = now - self._began, max(1, done - self._before)
        return since / count * max(0, self.total - done)
