"""The output of a launch: a small protocol, and a console that prints."""

from __future__ import annotations

from typing import Any, Protocol, TextIO

from phalanx.observe.guard import guarded_streams
from phalanx.observe.streams import Streams, labelled_line


class Console(Protocol):
    """Where the supervisor shows output, events and notices. Called from the supervisor's thread only."""

    streams: Streams

    def rank_output(self, rank: int, label: str, text: str, *, err: bool = False) -> None:
        r"""Show a line that a rank printed, with its end: "\n", "\r\n", or "\r" where it will be redrawn.

        A text without an end is the beginning of a line whose rest follows. `err`: it came from standard error.
        """

    def handle(self, event: dict[str, Any]) -> None:
        """Take one event a rank sent: a dict with an "event" key."""

    def notice(self, text: str) -> None:
        """Show a message of the launcher."""


class PlainConsole:
    """Prints rank output as it is (labelled when several ranks speak) and notices to stderr."""

    def __init__(self, *, labelled: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._labelled = labelled
        self._out, self._err = guarded_streams(out, err)
        self.streams = Streams.of(self._out, self._err)

    def rank_output(self, rank: int, label: str, text: str, *, err: bool = False) -> None:
        """Print the text; keep a redrawn line on the same row of the terminal."""
        self._write(self._err if err else self._out, labelled_line(label, text) if self._labelled else text)

    def handle(self, event: dict[str, Any]) -> None:
        """Ignore events: they are for consoles that draw."""

    def notice(self, text: str) -> None:
        """Print to stderr, so that piped output is the ranks' alone."""
        self._write(self._err, f"phalanx: {text}\n")

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()
