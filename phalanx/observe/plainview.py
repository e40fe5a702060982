"""The console for pipes, files and notebooks: lines with the time of day, one every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from phalanx.observe import format
from phalanx.observe.events import RunStarted, StepDone
from phalanx.observe.format import Pace


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
        self._pace = Pace(0, None, clock)

    def wait(self, text: str) -> None:
        """Show what happens before training."""
        self.line(text)

    def begin(self, run: RunStarted) -> None:
        """Show what is about to run."""
        self._pace = Pace(run.first_step, run.total_steps, self._clock)
        self.line(format.start_line(run))

    def step(self, event: StepDone, run: RunStarted | None) -> None:
        """Show a step if it is time; otherwise remember it in case it is the last."""
        left = self._pace.remaining(event.step)
        text = format.step_line(event, run) + (f" eta {format.clock(left)}" if left else "")
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
