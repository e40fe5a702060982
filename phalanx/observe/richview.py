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
from rich.table import Table
from rich.text import Text

from phalanx.observe import format
from phalanx.observe.events import RunStarted, StepDone

if TYPE_CHECKING:
    from rich.console import RenderableType


_REFRESH_PER_SECOND = 8
_NAME_WIDTH = 16
_LONGEST_ROW = 1 << 16
_STYLES = {"info": "", "dim": "dim", "good": "green", "warning": "yellow", "metrics": "cyan"}


class RichView:
    """Draws with rich; nothing is drawn before the run has started or after it has ended."""

    def __init__(self, out: TextIO, err: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = Terminal(file=out, highlight=False, emoji=False)
        self._errors = Terminal(file=err, highlight=False, emoji=False)
        self._clock = clock
        self._live: Live | None = None
        self._run: RunStarted | None = None
        self._last: StepDone | None = None
        self._activity: str | None = None
        self._row = ""
        self._started = clock()

    def begin(self, run: RunStarted) -> None:
        """Show what is about to run, and draw the empty bar."""
        self._run, self._last, self._started = run, None, self._clock()
        self._terminal.print(Text.assemble((run.name, "bold"), "  ", (format.start_line(run), "dim")))
        self._draw()

    def step(self, event: StepDone, run: RunStarted | None) -> None:
        """Move the bar; the refresh thread draws it, so that many steps per second cost nothing."""
        self._last, self._activity = event, None
        self._draw()

    def activity(self, name: str | None) -> None:
        """Show next to the bar what happens between steps."""
        self._activity = name
        if self._live is not None:
            self._live.refresh()

    def settle(self) -> None:
        """Take the bar off the screen."""
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
        self._terminal.print(Panel(table, title=Text(title, style="bold"), title_align="left", expand=False))
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
        rows: list[RenderableType] = [self._progress_row(), self._figures_row()]
        if self._row:
            rows.append(Text.from_ansi(self._row.rstrip("\r"), no_wrap=True, overflow="ellipsis"))
        return Group(*rows)

    def _progress_row(self) -> Table:
        done = self._last.step if self._last else self._first_step()
        total = self._run.total_steps if self._run else None
        bar = ProgressBar(total=total, completed=done, pulse=total is None, width=None)
        epochs = self._run.epochs if self._run else None
        epoch = f"epoch {format.of_total(self._last.epoch, epochs)}" if self._last else "starting"
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True, max_width=_NAME_WIDTH, overflow="ellipsis")
        row.add_column(ratio=1)
        for _ in range(3):
            row.add_column(no_wrap=True)
        name = Text(self._run.name if self._run else "training", style="bold")
        row.add_row(name, bar, Text(format.of_total(done, total)), Text(epoch), Text(self._times(done), style="dim"))
        return row

    def _figures_row(self) -> Text:
        """Fit as many figures as the terminal is wide."""
        parts = [self._activity] if self._activity else []
        parts += format.step_parts(self._last) if self._last else []
        while len(parts) > 1 and len(" · ".join(parts)) > self._terminal.width:
            parts.pop()
        return Text(" · ".join(parts) or "waiting for the first step", style="cyan", no_wrap=True, overflow="ellipsis")

    def _times(self, done: int) -> str:
        elapsed = self._clock() - self._started
        total = self._run.total_steps if self._run else None
        fresh = done - self._first_step()
        if not total or fresh <= 0:
            return format.clock(elapsed)
        return f"{format.clock(elapsed)} < {format.clock(elapsed / fresh * max(0, total - done))}"

    def _first_step(self) -> int:
        return self._run.first_step if self._run else 0
