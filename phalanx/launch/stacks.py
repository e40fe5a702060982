"""Read the stacks that faulthandler wrote, and say in short where a rank is."""

from __future__ import annotations

import os
import re
import runpy
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch.error_file import LAUNCHER_FILES

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"

    @property
    def is_launchers(self) -> bool:
        """Whether it belongs to this package or to the way modules are run."""
        return self.file.startswith((*LAUNCHER_FILES, "<frozen runpy")) or self.file == runpy.__file__

    @property
    def is_users(self) -> bool:
        """Whether it is neither the standard library's, an installed package's nor the launcher's."""
        libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *LAUNCHER_FILES, "<frozen")
        return not self.file.startswith(libraries)


_WAITING = (
    os.path.join("torch", "distributed", "distributed_c10d.py"),
    os.path.join("torch", "autograd", "graph.py"),
    os.path.join("phalanx", "comm", ""),
)
"""Where a rank waits for others: in a collective, or in a backward pass, which may contain one."""
_INNER_FRAMES = 6


def is_waiting(path: Path) -> bool:
    """Whether a rank's stack ends in a collective: then it waits for others, as far as can be seen."""
    innermost = _read(path)[:_INNER_FRAMES]
    return any(part in frame.file for frame in innermost for part in _WAITING)


def main_stack(text: str) -> list[Frame]:
    """Return the stack of the thread that took the signal, innermost first, out of the latest dump in `text`."""
    frames: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(("Current thread", "Thread ", "Fatal Python error")):
            if line.startswith("Current thread"):
                frames = []
            inside = line.startswith("Current thread")
        elif inside and (match := _FRAME.match(line)):
            frames.append(Frame(match["file"], match["line"], match["function"]))
    # What is left at the outer end is how the launcher got to the user's program.
    while frames and frames[-1].is_launchers:
        frames.pop()
    return frames


def whereabouts(path: Path) -> str:
    """Say where a rank is: the innermost line of the user's code, and the library call it made where that differs."""
    frames = _read(path)
    if not frames:
        return "at an unknown place: it did not answer with a stack"
    own = next((frame for frame in frames if frame.is_users), None)
    if own is None or own == frames[0]:
        return f"at {frames[0]}"
    return f"at {own} (in {frames[0].function}, {Path(frames[0].file).name}:{frames[0].line})"


def _read(path: Path) -> list[Frame]:
    try:
        return main_stack(path.read_text(errors="replace"))
    except FileNotFoundError:
        return []
