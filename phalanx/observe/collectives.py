"""The latest collectives of this process: what was called, in which group, from which line, and whether it ended.

torch's flight recorder keeps those of gloo and nccl (`TORCH_FR_BUFFER_SIZE`, which the launcher sets); the ring here
keeps those that torch does not see, in shared memory and over point-to-point messages. Both are compared between ranks
when a run hangs.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from phalanx.host.processes import PACKAGE

VARIABLE = "TORCH_FR_BUFFER_SIZE"
"""How many collectives are kept, by torch and here; 0: none."""
KEPT = 1000
_MAIN = threading.main_thread()
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")}
    | {os.path.join(PACKAGE, ""), "<frozen", "<string>"}
)
_BEFORE_SHAPE = re.compile(r" of (?=\()| (?=\(\d*,?)")
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_BELOW = tuple(os.path.join(PACKAGE, name, "") for name in ("comm", "launch", "observe", "world", "host"))


class _UsersFiles(dict[str, bool]):
    """Whether files are the user's, by name; a plain lookup where it is known."""

    def __missing__(self, file: str) -> bool:
        found = self[file] = not file.startswith(_LIBRARIES) and not any(part in file for part in _PACKAGES)
        return found


_USERS = _UsersFiles()


def is_users(file: str) -> bool:
    """Whether a source file is neither the standard library's, an installed package's nor Phalanx's."""
    return _USERS[file]


@functools.cache
def is_loops(file: str) -> bool:
    """Whether a source file is Phalanx's, above its communication and its launcher."""
    return file.startswith(PACKAGE) and not file.startswith(_BELOW)


def pick_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return the caller among (file, line), innermost first: the user's code, else Phalanx's, else the innermost."""
    found = list(frames)
    for is_callers in (is_users, is_loops):
        for file, line in found:
            if is_callers(file):
                return f"{os.path.basename(file)}:{line}"
    return f"{os.path.basename(found[0][0])}:{found[0][1]}" if found else "an unknown line"


def _all_lines(frame: FrameType | None) -> list[tuple[str, int]]:
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


class GroupCalls:
    """The calls of one group. All of them are made in one order, so that a number says which are done."""

    __slots__ = ("_append", "done", "name", "number", "ranks")

    def __init__(self, name: str, ranks: Sequence[int], append: Callable[[tuple[Any, ...]], None]) -> None:
        self.name, self.ranks = name, list(ranks)
        self.number = self.done = 0
        self._append = append

    def enter(self, what: bytes) -> None:
        """Note that a collective is entered: `what` is its name, operation, shape and dtype.

        Kept short, and one tuple per call: what a step does in between has cleared the caches.
        """
        self.number = number = self.number + 1
        frame: FrameType | None = sys._getframe(3)  # those between do not belong to the user
        while frame is not None:
            code = frame.f_code
            if _USERS[code.co_filename]:
                self._append((self, number, what, code, frame.f_lineno, time.time()))
                return
            frame = frame.f_back
        # No frame is kept alive. A thread that communicates in the background adds the lines of the main thread.
        lines = _all_lines(sys._getframe(3))
        if threading.get_ident() != _MAIN.ident:
            lines += _all_lines(sys._current_frames().get(_MAIN.ident or 0))
        self._append((self, number, what, lines, 0, time.time()))

    def leave(self) -> None:
        """Note that all ranks have entered the last one."""
        self.done = self.number


class CallRing:
    """The latest calls of this process that torch does not record."""

    def __init__(self, kept: int) -> None:
        self._calls: deque[tuple[Any, ...]] = deque(maxlen=kept)
        self._groups: dict[str, GroupCalls] = {}

    def group(self, name: str, ranks: Sequence[int]) -> GroupCalls:
        """Return the calls of the group with a name that all of its ranks give, and its global ranks."""
        if name not in self._groups:
            self._groups[name] = GroupCalls(name, ranks, self._calls.append)
        return self._groups[name]

    @property
    def groups(self) -> dict[str, list[int]]:
        """The global ranks of each group, by its name."""
        return {name: group.ranks for name, group in self._groups.items()}

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the calls as the ranks' records have them."""
        found = []
        for group, number, what, code, line, began in list(self._calls):
            op, *detail = _BEFORE_SHAPE.split(what.decode(errors="replace"), maxsplit=1)
            where = pick_line(code if isinstance(code, list) else [(code.co_filename, line)])
            call = {"group": group.name, "number": number, "op": op, "where": where}
            detail = detail if op != "barrier" else []
            found.append({**call, "detail": "".join(detail), "began": began, "done": number <= group.done})
        return found


@functools.cache
def call_ring() -> CallRing | None:
    """Return the ring of this process; None where nothing is recorded: no launcher of Phalanx started it."""
    given = os.environ.get(VARIABLE, "0")
    return CallRing(int(given)) if given.isdecimal() and int(given) > 0 else None
