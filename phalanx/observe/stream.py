"""Hand each event to every sink, and never let a sink stop the training."""

from __future__ import annotations

import dataclasses
import traceback
from typing import TYPE_CHECKING, Protocol

from phalanx.observe.guard import say_to_user

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
            except Exception as error:  # noqa: BLE001 - whatever a logger breaks on, the run outlives it
                self._drop(sink, error)

    def close(self) -> None:
        """Close every sink; the stream takes nothing more."""
        for sink in tuple(self._sinks):
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - the trained model matters more than its log's last line
                self._drop(sink, error)
        self._sinks.clear()

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        # A full disk explains itself; a mistake in a sink is found by its lines.
        cause = f" {error}" if isinstance(error, OSError) else f"\n{traceback.format_exc(limit=-3)}"
        say_to_user(f"{type(sink).__name__} failed and gets no more events:{cause.rstrip()}")
