"""Hand each event to every sink, and never let a sink stop the training."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.observe.events import Event


class Sink(Protocol):
    """Something that takes events: a file, a dashboard, a terminal."""

    def handle(self, event: Event) -> None:
        """Take one event; called between training steps, so be quick."""

    def close(self) -> None:
        """Write out what is pending and let go of everything."""


class EventStream:
    """The sinks of one rank. A sink that raises is reported once and dropped."""

    def __init__(self, sinks: Iterable[Sink] = (), rank: int = 0) -> None:
        self.rank = rank
        self._sinks = list(sinks)

    def add(self, sink: Sink) -> None:
        """Let a sink take the events from now on."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Give an event to every sink."""
        if not self._sinks:
            return
        if event.rank is None:
            event = dataclasses.replace(event, rank=self.rank)
        for sink in tuple(self._sinks):
            try:
                sink.handle(event)
            except Exception:  # noqa: BLE001 - whatever a logger breaks on, the run outlives it
                self._drop(sink)

    def close(self) -> None:
        """Close every sink; the stream takes nothing more."""
        for sink in tuple(self._sinks):
            try:
                sink.close()
            except Exception:  # noqa: BLE001 - the trained model matters more than its log's last line
                self._drop(sink)
        self._sinks.clear()

    def _drop(self, sink: Sink) -> None:
        self._sinks.remove(sink)
        cause = traceback.format_exc(limit=-3)
        print(f"phalanx: {type(sink).__name__} failed and gets no more events:\n{cause}", file=sys.stderr)
