"""The console: a live bar on a terminal, a line every few seconds elsewhere, a summary at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from phalanx.observe import events, format, heartbeat
from phalanx.observe.events import Event, MetricsReported, RunStarted, StepDone
from phalanx.observe.format import Pace
from phalanx.observe.guard import Streams, guarded_streams, labelled_line
from phalanx.observe.heartbeat import Beat, Board, HeartbeatBoard, board_path

if TYPE_CHECKING:
    from phalanx.observe.richview import RichView  # imports rich


_ACTIVITIES = {
    "evaluate": "evaluating",
    "checkpoint": "saving a checkpoint",
    "compile": "compiling the model",
    "joining": "connecting the ranks",
    "joined": "preparing the model and the data",
}
_SLOW_CHECKPOINT = 5.0
"""A checkpoint that took longer than this many seconds gets a line."""


class Console:
    """Shows events, the ranks' own output and the launcher's notices; by lines, or drawn on a terminal.

    `progress`: whether steps, epochs and metrics are shown; without them the summary and warnings remain, on standard
    error, so that standard output has only what the ranks print.
    `verbosity`: "quiet" leaves one line at the end (none without progress); "verbose" shows every event.
    `log_dir`: where the launcher keeps the heartbeats, by which the bar moves between two events.
    """

    def __init__(
        self,
        *,
        show_labels: bool = False,
        progress: bool = True,
        verbosity: str = "normal",
        log_dir: Path | None = None,
        interval: float = 5.0,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show_labels = show_labels
        self._is_quiet, self._is_verbose = verbosity == "quiet", verbosity == "verbose"
        self._progress = progress
        self._log_dir = log_dir
        self._board: Board | None = None
        self._run: RunStarted | None = None
        out, err = guarded_streams(out, err)
        self.streams = Streams.of(out, err)
        self._out = out
        stream = out if progress else err
        interval = 0.0 if self._is_verbose else interval
        self._view: PlainView | RichView = PlainView(stream, err, interval=interval, clock=clock)
        if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown"):
            from phalanx.observe.richview import RichView

            self._view = RichView(stream, err, self._beat, clock=clock)

    def rank_output(self, rank: int, label: str, text: str, *, err: bool = False) -> None:
        """Show what a rank printed, labelled when several ranks are shown."""
        text = labelled_line(label, text) if self._show_labels else text
        if self._progress or err:
            self._view.output(text, err=err)
        else:
            self._out.write(text)
            self._out.flush()

    def handle(self, event: Event | Mapping[str, Any]) -> None:
        """Show an event, given as such or as plain data; unknown kinds are ignored."""
        if not isinstance(event, events.Event):
            if event.get("event") in ("joining", "joined"):
                self._show_start(event["event"], event["rank"])
            if event.get("event") not in events.KINDS:
                return
            event = events.from_dict(event)
        if isinstance(event, events.RunStarted):
            self._begin(event)
        elif isinstance(event, events.RunEnded):
            self._end(event)
        elif isinstance(event, events.Message):
            self._show_message(event)
        elif isinstance(event, events.RankLost):
            self._view.line(format.lost_line(event), kind="warning")
        elif isinstance(event, events.Recovered):
            self._view.line(format.recovered_line(event), kind="warning")
        elif isinstance(event, events.RankSuspected):
            self._view.line(f"warning: step {event.step}: {event.why}", kind="warning")
        elif isinstance(event, events.SampleDrawn):
            self._show_message(events.Message("info", f"sample:\n{event.text}"))
        elif self._progress and not self._is_quiet:
            self._show_progress(event)

    def notice(self, text: str) -> None:
        """Show a notice of the launcher."""
        if self._progress:
            self._view.line(text, kind="dim")
        else:
            self._view.output(f"phalanx: {text}\n", err=True)

    def error(self, text: str) -> None:
        """Show an error on standard error."""
        self._view.settle()
        self._view.error(text)

    def close(self) -> None:
        """Remove the bar, or show the last step."""
        self._view.close()

    def _begin(self, event: RunStarted) -> None:
        self._run = event
        if self._log_dir is None:
            self._board = heartbeat.current()
        else:  # made anew for every attempt; not every launcher makes one
            path = board_path(self._log_dir)
            self._board = HeartbeatBoard(path) if path.exists() else None
        if not self._progress or self._is_quiet:
            return
        if event.resumed_from:
            self._view.line(f"resumed from {event.resumed_from} at step {event.first_step}", kind="good")
        self._view.begin(event)

    def _end(self, event: events.RunEnded) -> None:
        self._view.settle()
        rows = format.summary_rows(event, self._run, detailed=self._is_verbose)
        if not self._is_quiet:
            self._view.summary(format.summary_title(event), rows, event.next_commands)
        elif self._progress:
            self._view.summary(format.summary_sentence(event, self._run), [], [])

    def _show_start(self, phase: str, rank: int) -> None:
        """Show that a rank has reached or left the point where all ranks wait for each other."""
        if self._progress and not self._is_quiet:
            if rank == 0 and self._run is None:
                self._view.activity(_ACTIVITIES[phase])
            if self._is_verbose:
                self._view.line(f"rank {rank} {'is ready to join' if phase == 'joining' else 'has joined'}", kind="dim")

    def _show_message(self, event: events.Message) -> None:
        if event.level == "error":
            self.error(event.text)
        elif not self._is_quiet and (self._progress or event.level == "warning"):
            prefix = "warning: " if event.level == "warning" else ""
            self._view.line(prefix + event.text, kind="warning" if prefix else "info")

    def _show_progress(self, event: Event) -> None:
        if isinstance(event, events.StepDone):
            self._view.step(event, self._run)
        elif isinstance(event, events.EpochDone):
            self._view.line(format.epoch_line(event, self._run), kind="metrics")
        elif isinstance(event, events.MetricsReported) and event.split == events.LOGGED:
            self._view.log(event)
        elif isinstance(event, events.MetricsReported):
            if self._is_verbose or not event.ends_epoch:  # else the line of the epoch has the same values
                self._view.line(format.metrics_line(event, self._run), kind="metrics")
        elif isinstance(event, events.CheckpointSaved):
            if self._is_verbose or event.best or event.seconds > _SLOW_CHECKPOINT:
                self._view.line(format.checkpoint_line(event), kind="dim")
        elif isinstance(event, events.Phase):
            self._show_phase(event)
        elif isinstance(event, events.ServersReported):
            self._view.settle()
            for line in format.servers_lines(event):
                self._view.line(line)
        elif isinstance(event, events.Failure):
            self._view.settle()  # the launcher reports the cause once the ranks have stopped

    def _show_phase(self, event: events.Phase) -> None:
        name = _ACTIVITIES.get(event.name, event.name)
        if event.state == "end":
            self._view.activity(None)
            if self._is_verbose:
                self._view.line(f"{name}: {format.duration(event.seconds)}", kind="dim")
        elif self._run is None:
            self._view.wait(name)
        else:
            self._view.activity(name, event.total)
            if self._is_verbose:
                self._view.line(f"{name}{f': {event.total} batches' if event.total else ''}", kind="dim")

    def _beat(self) -> Beat | None:
        """Return where the main rank is now, if it has taken a step of this run."""
        beat = self._board.read(0) if self._board is not None else None
        return beat if beat is not None and self._run is not None and beat.time >= self._run.time else None


class PlainView:
    """Lines with the time of day; of the steps only the first, the last and one every `interval` seconds."""

    def __init__(
        self, out: TextIO, err: TextIO, *, interval: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._err = err
        self._interval = interval
        self._clock = clock
        self._due = -1.0
        self._pending: str | None = None
        self._logged: dict[str, float] = {}
        self._pace = Pace(0, None, clock)

    def wait(self, text: str) -> None:
        """Show what happens before training."""
        self.line(text)

    def begin(self, run: RunStarted) -> None:
        """Show what is about to run."""
        self._pace = Pace(run.first_step, run.total_steps, self._clock)
        self._logged = {}
        self.line(format.start_line(run))

    def log(self, event: MetricsReported) -> None:
        """Take values that the user logged: the line of the next step shows them."""
        self._logged |= event.values

    def step(self, event: StepDone, run: RunStarted | None) -> None:
        """Show a step if it is time; otherwise remember it in case it is the last."""
        remaining = self._pace.remaining(event.step)
        text = format.step_line(event, run, self._logged) + (f" eta {format.clock(remaining)}" if remaining else "")
        if self._clock() < self._due:
            self._pending = text
            return
        self._due = self._clock() + self._interval
        self._pending = None
        self.line(text)

    def activity(self, name: str | None, total: int | None = None) -> None:
        """Ignore what happens between steps: its result gets a line."""

    def settle(self) -> None:
        """Show the last step if it has not been shown."""
        if self._pending is not None:
            text, self._pending = self._pending, None
            self.line(text)
            self._due = self._clock() + self._interval

    def line(self, text: str, *, kind: str = "info") -> None:
        """Write a line after the time of day; the step that was measured goes before its metrics."""
        if kind == "metrics":
            self.settle()
        self._write(self._out, f"{time.strftime('%H:%M:%S')} {text}\n")

    def output(self, text: str, *, err: bool = False) -> None:
        """Write what a rank printed, as it is."""
        self._write(self._err if err else self._out, text)

    def error(self, text: str) -> None:
        """Write to standard error."""
        self._write(self._err, f"{text}\n")

    def summary(self, title: str, rows: list[tuple[str, str]], commands: list[str]) -> None:
        """Write the summary as aligned columns, and the commands to paste."""
        lines = [title, *([format.table(rows, "  ")] if rows else [])]
        if commands:
            lines += ["next:", *(f"  {command}" for command in commands)]
        self._write(self._out, "\n".join(lines) + "\n")

    def close(self) -> None:
        """Show what is pending."""
        self.settle()

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()
