"""Write the stacks of a rank's threads, read them back, and say in short where the rank is."""

from __future__ import annotations

import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from phalanx.launch.error_file import is_launchers
from phalanx.observe.call_ring import is_loops, is_users

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?),? in (?P<function>.*)$')


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
        return self.file.startswith("<string>") or is_launchers(self.file)

    @property
    def is_users(self) -> bool:
        """Whether it is neither the standard library's, an installed package's nor Phalanx's."""
        return is_users(self.file)


_RECORDER = os.path.join("phalanx", "diagnosis", "point_to_point.py")
_WAITING = (
    _RECORDER,
    os.path.join("torch", "distributed", "distributed_c10d.py"),
    os.path.join("torch", "autograd", "graph.py"),
    os.path.join("phalanx", "comm", ""),
)
"""Where a rank waits for others: in a collective, or in a backward pass, which may contain one."""
_INNER_FRAMES = 6
_MOST_FRAMES = 100
_MAIN_BEGINS = ("Current thread", "Stack (most recent")
"""How the stack of the thread to look at begins: in `write_stacks` and a crash, and in faulthandler's of one thread."""


def write_stacks(descriptor: int) -> None:
    """Replace a file's content by the stacks of all threads, innermost frame first, the main thread before the others.

    It has the interpreter lock, as all Python code: no frame is freed while it is read. faulthandler, which reads the
    frames of other threads without the lock, can crash the process.
    """
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frames.pop(threading.get_ident())
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = _stack_lines("Current thread", frames.pop(main)) if main in frames else []
    for ident, frame in frames.items():
        lines += ["", *_stack_lines(f"Thread {names.get(ident, 'of a library')}", frame)]
    text = "\n".join(lines).encode(errors="replace") + b"\n"
    size = os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, size)
    os.lseek(descriptor, size, os.SEEK_SET)  # what faulthandler writes follows


def _stack_lines(title: str, frame: FrameType | None) -> list[str]:
    lines = [f"{title} (most recent call first):"]
    while frame is not None and len(lines) <= _MOST_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or "???"} in {code.co_name}')
        frame = frame.f_back
    return lines


def is_waiting(path: Path) -> bool:
    """Whether a rank's stack ends in a collective: then it waits for others, as far as can be seen."""
    innermost = _read(path)[:_INNER_FRAMES]
    return any(part in frame.file for frame in innermost for part in _WAITING)


def parse_frame(line: str) -> Frame | None:
    """Return the frame that a line of a stack or traceback shows; None for another line."""
    match = _FRAME.match(line)
    return Frame(match["file"], match["line"], match["function"]) if match else None


def main_stack(text: str) -> list[Frame]:
    """Return the stack of the main thread, or of the one that crashed, innermost first, of the latest in `text`."""
    frames: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if line.startswith((*_MAIN_BEGINS, "Thread ", "Fatal Python error")):
            inside = line.startswith(_MAIN_BEGINS)
            frames = [] if inside else frames
        elif inside and (frame := parse_frame(line)) is not None:
            frames.append(frame)
    # What is left at the outer end is how the launcher got to the user's program.
    while frames and frames[-1].is_launchers:
        frames.pop()
    return frames


def latest_dump(text: str, threads: bool) -> str:
    """Return the stack of the main thread in the latest dump of `text`, or of all threads, for a reader."""
    if not threads:
        frames = _without_recorder(main_stack(text))
        return "\n".join(f"  {frame.file}:{frame.line} in {frame.function}" for frame in frames)
    latest = text[max(0, *(text.rfind(begin) for begin in _MAIN_BEGINS)) :]
    return "\n".join(f"  {line}" for line in latest.strip().splitlines())


def whereabouts(path: Path) -> str:
    """Say where a rank is, from the stack that it wrote."""
    frames = _read(path)
    return describe_frames(frames) if frames else "at an unknown place: it did not answer with a stack"


def _without_recorder(frames: list[Frame]) -> list[Frame]:
    """Leave out the wrapper that records calls, which is around every wait."""
    return [frame for frame in frames if not frame.file.endswith(_RECORDER)] or frames


def describe_frames(frames: list[Frame]) -> str:
    """Say where the innermost line of the user's code, else of Phalanx is, and which library call it made."""
    frames = _without_recorder(frames)
    innermost = next((frame for frame in frames if frame.is_users), None)
    innermost = innermost or next((frame for frame in frames if is_loops(frame.file)), None)
    if innermost is None or innermost == frames[0]:
        return f"at {frames[0]}"
    return f"at {innermost} (in {frames[0].function}, {Path(frames[0].file).name}:{frames[0].line})"


def _read(path: Path) -> list[Frame]:
    try:
        return main_stack(path.read_text(errors="replace"))
    except FileNotFoundError:
        return []
