"""The console for terminals: a live bar of two lines at the bottom, everything else scrolling above it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from phalanx.observe import format
from phalanx.observe.events import MetricsReported, RunStarted, StepDone
from phalanx.observe.format import Pace
from phalanx.observe.heartbeat import Beat

if TYPE_CHECKING:
    from rich.console import RenderableType


_REFRESH_PER_SECOND = 8
_NAME_WIDTH = 16
_WIDE = 50
"""Columns from which the bar's row has room for the epoch."""
_LONGEST_ROW = 1 << 16
_STYLES = {"info": "", "dim": "dim", "good": "green", "warning": "yellow", "metrics": "cyan"}


class RichView:
    """Draws with rich; nothing is drawn before the ranks are started or after the run has ended.

    `beat` returns where the main rank is; it is asked whenever the bar is drawn, so the bar moves between two events.
    """

    def __init__(
        self,
        out: TextIO,
        err: TextIO,
        beat: Callable[[], Beat | None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = Terminal(file=out, highlight=False, emoji=False)
        self._errors = Terminal(file=err, highlight=False, emoji=False)
        self._beat = beat
        self._clock = clock
        self._live: Live | None = None
        self._run: RunStarted | None = None
        self._last: StepDone | None = None
        self._logged: dict[str, float] = {}
        self._pace = Pace(0, None, clock)
        self._activity: tuple[str, Pace] | None = None
        self._spinner = Spinner("dots" if "utf" in self._terminal.encoding.lower() else "line", style="cyan")
        self._row = ""

    def wait(self, text: str) -> None:
        """Draw a spinner with what happens before training."""
        self.activity(text)
        self._draw()

    def begin(self, run: RunStarted) -> None:
        """Show what is about to run, and draw the empty bar."""
        self._run, self._last, self._activity, self._logged = run, None, None, {}
        self._pace = Pace(run.first_step, run.total_steps, self._clock)
        self._terminal.print(Text.assemble((run.name, "bold"), "  ", (format.start_line(run), "dim")))
        self._draw()

    def log(self, event: MetricsReported) -> None:
        """Take values that the user logged: they are among the figures below the bar."""
        self._logged |= event.values

    def step(self, event: StepDone, run: RunStarted | None) -> None:
        """Move the bar; the refresh thread draws it, so that many steps per second cost nothing."""
        self._last, self._activity = event, None
        self._draw()

    def activity(self, name: str | None, total: int | None = None) -> None:
        """Show below the bar what happens between steps; `total`: how many batches it has."""
        self._activity = None if name is None else (name, Pace(0, total, self._clock))
        if self._live is not None:
            self._live.refresh()

    def settle(self) -> None:
        """Take the bar off the screen."""
        self._activity = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, text: str, *, kind: str = "info") -> None:
        """Write a line above the bar."""
        self._terminal.print(Text(text, style=_STYLES.get(kind, "")))

    def output(self, text: str, *, err: bool = False) -> None:
        """Write a rank's line above the bar; one that is not finished, or will be redrawn, gets a row below the bar.

        Without a bar the terminal is the rank's alone, and gets its text as it is.
        """
        apart = err and not self._errors.is_terminal
        if self._live is None or apart:
            file = self._errors.file if err else self._terminal.file
            file.write(text)
            file.flush()
            return
        row = self._row + text
        # What a row shows after its carriage returns: the text after the last one that is followed by something.
        self._row = row[row.rstrip("\r\n").rfind("\r") + 1 :]
        if text.endswith("\n") or len(self._row) > _LONGEST_ROW:
            self._terminal.print(Text.from_ansi(self._row.rstrip("\r\n")), soft_wrap=True)
            self._row = ""

    def error(self, text: str) -> None:
        """Write to standard error, with the bar out of the way."""
        self.settle()
        self._errors.print(Text(text, style="red"), soft_wrap=True)

    def summary(self, title: str, rows: list[tuple[str, str]], commands: list[str]) -> None:
        """Draw the summary, and below it the commands, undecorated so that they can be copied."""
        self.settle()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(label, Text(value))
        if rows:
            self._terminal.print(Panel(table, title=Text(title, style="bold"), title_align="left", expand=False))
        else:
            self._terminal.print(Text(title), soft_wrap=True)
        for command in commands:
            self._terminal.print(Text.assemble(("next  ", "dim"), (command, "bold")), soft_wrap=True)

    def close(self) -> None:
        """Take the bar off the screen and stop drawing."""
        self.settle()

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=self._bar,
                console=self._terminal,
                refresh_per_second=_REFRESH_PER_SECOND,
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()

    def _bar(self) -> RenderableType:
        beat = self._beat()
        rows: list[RenderableType] = []
        if self._run is not None:
            rows += [self._progress_row(self._run, beat), self._figures_row()]
        if self._activity is not None:
            rows.append(self._activity_row(*self._activity, beat))
        if self._row:
            rows.append(Text.from_ansi(self._row.rstrip("\r"), no_wrap=True, overflow="ellipsis"))
        return Group(*rows)

    def _progress_row(self, run: RunStarted, beat: Beat | None) -> Table:
        logged = self._last.step if self._last else run.first_step
        done = max(logged, beat.step) if beat else logged
        parts = [format.of_total(done, run.total_steps), _times(self._pace, done)]
        if self._last and self._last.epoch and self._terminal.width >= _WIDE:
            parts.insert(1, f"epoch {format.of_total(self._last.epoch, run.epochs)}")
        return self._row_of(Text(run.name, style="bold"), done, run.total_steps, parts)

    def _activity_row(self, name: str, pace: Pace, beat: Beat | None) -> RenderableType:
        """Return a spinner with what happens; an evaluation has a bar where the number of its batches is known."""
        if not pace.total:
            row = Table.grid(padding=(0, 1))
            row.add_column()
            row.add_column(no_wrap=True, overflow="ellipsis")
            row.add_row(self._spinner, Text(f"{name} {format.clock(pace.elapsed)}", style="cyan"))
            return row
        done = min(beat.part, pace.total) if beat else 0
        return self._row_of(Text(name, style="cyan"), done, pace.total, [f"{done}/{pace.total}", _times(pace, done)])

    def _row_of(self, name: Text, done: int, total: int | None, parts: list[str]) -> Table:
        bar = ProgressBar(total=total, completed=done, pulse=total is None, width=None)
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True, max_width=_NAME_WIDTH, overflow="ellipsis")
        row.add_column(ratio=1)
        for _ in parts:
            row.add_column(no_wrap=True)
        row.add_row(name, bar, *(Text(part) for part in parts[:-1]), Text(parts[-1], style="dim"))
        return row

    def _figures_row(self) -> Text:
        """Fit as many figures as the terminal is wide."""
        parts = format.step_parts(self._last, self._run, self._logged) if self._last else []
        while len(parts) > 1 and len(" · ".join(parts)) > self._terminal.width:
            parts.pop()
        return Text(" · ".join(parts) or "waiting for the first step", style="cyan", no_wrap=True, overflow="ellipsis")


def _times(pace: Pace, done: int) -> str:
    """Return how long it has taken, and how long it will take: `0:10 < 0:27`."""
    remaining = pace.remaining(done)
    return format.clock(pace.elapsed) + ("" if remaining is None else f" < {format.clock(remaining)}")
