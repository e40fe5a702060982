"""Where a launch speaks to its user: a small protocol, and a console that just prints."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO


class Console(Protocol):
    """What the supervisor tells while the ranks run. Called from the supervisor's own thread only."""

    def rank_output(self, rank: int, label: str, line: str) -> None:
        """Show one line a rank printed, without its newline; a trailing carriage return means it will be redrawn."""

    def handle(self, event: dict[str, Any]) -> None:
        """Take one event a rank sent: a dict with an "event" key."""

    def notice(self, text: str) -> None:
        """Show the launcher's own words."""


class PlainConsole:
    """Prints rank output as it is (labelled when several ranks speak) and notices to stderr."""

    def __init__(self, *, labelled: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._labelled = labelled
        self._out = out
        self._err = err

    def rank_output(self, rank: int, label: str, line: str) -> None:
        """Print the line; keep a redrawn line on the same row of the terminal."""
        prefix = f"[{label}] " if self._labelled else ""
        end = "" if line.endswith("\r") else "\n"
        print(f"{prefix}{line}", end=end, file=self._out or sys.stdout, flush=True)

    def handle(self, event: dict[str, Any]) -> None:
        """Ignore events: they are for consoles that draw."""

    def notice(self, text: str) -> None:
        """Print the launcher's words to stderr, so that piped output stays the ranks' own."""
        print(f"phalanx: {text}", file=self._err or sys.stderr, flush=True)
