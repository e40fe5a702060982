"""The console: a live bar on a terminal, a line every few seconds elsewhere, a summary at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from phalanx.observe import events, format
from phalanx.observe.events import Event, RunStarted, StepDone
from phalanx.observe.guard import Streams, guarded_streams, labelled_line

if TYPE_CHECKING:
    from phalanx.observe.richview import RichView  # imports rich


class PlainView:
    """Writes lines; of the steps only the first, the last and one every `interval` seconds."""

    def __init__(
        self, out: TextIO, err: TextIO, *, interval: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._err = err
        self._interval = interval
        self._clock = clock
        self._due = -1.0
        self._pending: str | None = None

    def begin(self, run: RunStarted) -> None:
        """Show what is about to run."""
        self.line(format.start_line(run))

    def step(self, event: StepDone, run: RunStarted | None) -> None:
        """Show a step if it is time; otherwise remember it in case it is the last."""
        text = format.step_line(event, run)
        if self._clock() < self._due:
            self._pending = text
            return
        self._due = self._clock() + self._interval
        self._pending = None
        self.line(text)

    def activity(self, name: str | None) -> None:
        """Ignore what happens between steps: its result gets a line."""

    def settle(self) -> None:
        """Show the last step if it has not been shown."""
        if self._pending is not None:
            self.line(self._pending)
            self._pending = None
            self._due = self._clock() + self._interval

    def line(self, text: str, *, kind: str = "info") -> None:
        """Write a line; the step that was measured goes before its metrics."""
        if kind == "metrics":
            self.settle()
        self._write(self._out, f"{text}\n")

    def output(self, text: str, *, err: bool = False) -> None:
        """Write what a rank printed, as it is."""
        self._write(self._err if err else self._out, text)

    def error(self, text: str) -> None:
        """Write to standard error."""
        self._write(self._err, f"{text}\n")

    def summary(self, title: str, rows: list[tuple[str, str]], commands: list[str]) -> None:
        """Write the summary as aligned columns, and the commands to paste."""
        width = max((len(label) for label, _ in rows), default=0)
        lines = [title, *(f"  {label.ljust(width)}  {value}" for label, value in rows)]
        if commands:
            lines += ["next:", *(f"  {command}" for command in commands)]
        self.line("\n".join(lines))

    def close(self) -> None:
        """Show what is pending."""
        self.settle()

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()


_ACTIVITIES = {"eval": "evaluating", "evaluate": "evaluating", "evaluation": "evaluating", "checkpoint": "saving"}


class Console:
    """Shows events, the ranks' own output and the launcher's notices; by lines, or drawn on a terminal."""

    def __init__(
        self,
        *,
        show_labels: bool = False,
        interval: float = 5.0,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self._show_labels = show_labels
        self._run: RunStarted | None = None
        out, err = guarded_streams(out, err)
        self.streams = Streams.of(out, err)
        self._view: PlainView | RichView = PlainView(out, err, interval=interval)
        if out.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown"):
            from phalanx.observe.richview import RichView

            self._view = RichView(out, err)

    def rank_output(self, rank: int, label: str, text: str, *, err: bool = False) -> None:
        """Show what a rank printed, labelled when several ranks are shown."""
        self._view.output(labelled_line(label, text) if self._show_labels else text, err=err)

    def handle(self, event: Event | Mapping[str, Any]) -> None:
        """Show an event, given as such or as plain data; unknown kinds are ignored."""
        if not isinstance(event, events.Event):
            if event.get("event") not in events.KINDS:
                return
            event = events.from_dict(event)
        if isinstance(event, events.StepDone):
            self._view.step(event, self._run)
        elif isinstance(event, events.RunStarted):
            self._run = event
            if event.resumed_from:
                self._view.line(f"resumed from {event.resumed_from} at step {event.first_step}", kind="good")
            self._view.begin(event)
        elif isinstance(event, events.RunEnded):
            self._view.settle()
            rows = format.summary_rows(event, self._run)
            self._view.summary(format.summary_title(event), rows, event.next_commands)
        else:
            self._show_other(event)

    def notice(self, text: str) -> None:
        """Show a notice of the launcher."""
        self._view.line(text, kind="dim")

    def error(self, text: str) -> None:
        """Show an error on standard error."""
        self._view.settle()
        self._view.error(text)

    def close(self) -> None:
        """Remove the bar, or show the last step."""
        self._view.close()

    def _show_other(self, event: Event) -> None:
        if isinstance(event, events.EpochDone):
            self._view.line(format.epoch_line(event, self._run), kind="metrics")
        elif isinstance(event, events.MetricsReported):
            if not event.ends_epoch:  # else the line of the epoch has the same values
                self._view.line(format.metrics_line(event, self._run), kind="metrics")
        elif isinstance(event, events.CheckpointSaved):
            self._view.line(format.checkpoint_line(event), kind="dim")
        elif isinstance(event, events.Phase):
            self._view.activity(_ACTIVITIES.get(event.name, event.name) if event.state == "begin" else None)
        elif isinstance(event, events.Membership):
            self._view.line(format.membership_line(event), kind="warning")
        elif isinstance(event, events.ServersReported):
            self._view.settle()
            for line in format.servers_lines(event):
                self._view.line(line)
        elif isinstance(event, events.Message):
            if event.level == "error":
                self.error(event.text)
            else:
                prefix = "warning: " if event.level == "warning" else ""
                self._view.line(prefix + event.text, kind="warning" if prefix else "info")
        elif isinstance(event, events.Failure):
            self._view.settle()  # the launcher reports the cause once the ranks have stopped
