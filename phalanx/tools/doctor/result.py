"""What a check says: its level, its topic, what was found, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
EXIT_CODES: dict[Level, int] = {"ok": 0, "note": 0, "warning": 1, "error": 3}
"""2 is the exit code of wrong flags."""


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    level: Level
    topic: str
    text: str
    fix: str = ""
    """The variable to set or the command to run."""


def worst(results: Iterable[CheckResult]) -> Level:
    """Return the highest level among results."""
    return max((result.level for result in results), key=LEVELS.index, default="ok")
