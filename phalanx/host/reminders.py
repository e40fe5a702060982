"""When to report something that lasts: soon, then at growing intervals."""

from __future__ import annotations

from dataclasses import dataclass

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
