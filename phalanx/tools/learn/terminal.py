"""What `phalanx learn` draws in a terminal: the ranks of a grader while they run, and an algorithm that is played."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from phalanx.observe.format import size

_PER_SECOND = 8
_STYLES = {"own": "white on grey37", "part": "black on dark_orange", "done": "black on green3", "empty": "on grey15"}
_FRAME_SECONDS = 0.8


class LiveRanks:
    """One line per rank below the results that were printed; nothing is drawn where output is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live = Live("", console=self._console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> LiveRanks:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def print(self, text: str) -> None:
        """Print lines above the ranks."""
        self._console.print(Text(text))

    def watch(self, exercise: Any) -> Callable[[list[dict[str, Any]]], None] | None:
        """Return what shows the states of the ranks of an exercise; None where nothing can be drawn."""
        if not self._console.is_terminal:
            return None
        began = time.monotonic()

        def show(states: list[dict[str, Any]]) -> None:
            now = time.monotonic()
            if now - self._drawn >= 1 / _PER_SECOND:
                self._drawn = now
                lines = [f"        {exercise.name}  {now - began:.1f} s"]
                lines += [f"          rank {rank}  {_doing(state)}" for rank, state in enumerate(states)]
                self._live.update(Text("\n".join(lines), style="dim"), refresh=True)

        return show


def _doing(state: dict[str, Any]) -> str:
    text = str(state.get("doing", "starts"))
    if text == "waits":
        peer = "" if state["peer"] is None else f", rank {state['peer']}"
        text = f"waits in {state['kind']}{peer} (line {state['line']})"
    calls = state.get("calls", 0)
    return f"{text:<44} {calls:>4} calls" if calls else text


def play(story: Any, stream: TextIO, speed: float) -> None:
    """Play the frames in a terminal; print them one below the other where it cannot redraw."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    console.print(Text(f"{story.title}, {story.ranks} ranks", style="bold"))
    console.print(Text(story.text))
    total = len(story.frames)
    if not console.is_terminal:
        for number, frame in enumerate(story.frames, 1):
            console.print(_drawn(frame, number, total))
    else:
        with Live("", console=console, auto_refresh=False) as live:
            for number, frame in enumerate(story.frames, 1):
                live.update(_drawn(frame, number, total), refresh=True)
                time.sleep(_FRAME_SECONDS / speed)
    console.print(Text(f"sent in all: {story.totals()}"))


def _drawn(frame: Any, number: int, total: int) -> Group:
    widths = [len(text) for row in frame.cells for text, _ in row]
    width = max([6, *widths]) + 2
    lines: list[Text] = [Text(f"\n{number}/{total}  {frame.title}", style="bold")]
    for rank, row in enumerate(frame.cells):
        line = Text(f"  rank {rank}  ")
        for text, state in row:
            line.append(text.center(width), style=_STYLES[state])
            line.append(" ")
        sends = [message for message in frame.messages if message.source == rank]
        line.append("  " + ", ".join(_words(message) for message in sends), style="cyan")
        lines.append(line)
        lines.append(Text(f"          {frame.doing[rank]}", style="dim"))
    return Group(*lines)


def _words(message: Any) -> str:
    if message.target is None:
        return f"{message.kind} ({size(message.bytes)})"
    return f"-> rank {message.target} ({size(message.bytes)})"
