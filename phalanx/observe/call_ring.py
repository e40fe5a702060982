"""The latest collectives of this process: what was called, in which group, from which line, and whether it ended.

torch's flight recorder keeps those of gloo and nccl (`TORCH_FR_BUFFER_SIZE`, which the launcher sets); the ring here
keeps those that torch does not see: in shared memory, over point-to-point messages, and the user's own point-to-point
calls over gloo. All are compared between ranks when a run hangs.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from sys import _getframe
from time import time as now
from types import CodeType, FrameType
from typing import Any, NamedTuple

from phalanx.host.processes import PACKAGE

VARIABLE = "TORCH_FR_BUFFER_SIZE"
"""How many collectives are kept, by torch and here; 0: none."""
KEPT = 1000
_MAX_PLACES = 512
_PLACES_OF_ONE = 4
"""Places that are kept of one description: an evaluation may make the calls of training from another depth."""
_OWN_FRAMES = 2
"""Frames of the communication between `GroupCalls.enter` and the caller, at least."""
_MAIN = threading.main_thread()
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")}
    | {os.path.join(PACKAGE, ""), "<frozen", "<string>"}
)
_BEFORE_SHAPE = re.compile(r" of (?=\()| (?=\(\d*,?)")
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_BELOW = tuple(
    os.path.join(PACKAGE, name, "") for name in ("comm", "diagnosis", "launch", "observe", "recovery", "world", "host")
)


class _Gradients:
    """What the collectives of gradients are for: set where gradients are computed and averaged."""

    __slots__ = ("began", "bucket")

    def __init__(self) -> None:
        self.began = 0.0
        """When the last backward pass began, in seconds since the epoch; 0 where that is not known."""
        self.bucket = 0
        """The number of the bucket that is being averaged, from 1; 0: none."""


GRADIENTS = _Gradients()


class _UsersFiles(dict[str, bool]):
    """Whether files are the user's, by name; a plain lookup where it is known."""

    def __missing__(self, file: str) -> bool:
        is_users = self[file] = not file.startswith(_LIBRARIES) and not any(part in file for part in _PACKAGES)
        return is_users


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
    lines = list(frames)
    for is_callers in (is_users, is_loops):
        for file, line in lines:
            if is_callers(file):
                return f"{os.path.basename(file)}:{line}"
    return f"{os.path.basename(lines[0][0])}:{lines[0][1]}" if lines else "an unknown line"


class _Place(NamedTuple):
    """Where calls with one description came from before: the frame at a depth, and the one that it called."""

    depth: int
    """Of the frame inside it, counted from `GroupCalls.enter`."""
    inner: CodeType
    code: CodeType
    outermost: int
    """The depth of the last frame where none of the stack is the user's, else 0."""


def _walk(start: FrameType, skipped: int) -> tuple[_Place, int, bool]:
    """Return the frame that called, its line, and whether it is the user's: `pick_line` for frames."""
    depth, inner, frame = 0, start, start.f_back if skipped else start
    candidate: tuple[int, FrameType, FrameType] | None = None
    is_kept_loops = False
    while frame is not None:
        file = frame.f_code.co_filename
        if depth >= skipped and _USERS[file]:
            return _Place(depth, inner.f_code, frame.f_code, 0), frame.f_lineno, True
        if depth >= skipped and not is_kept_loops and (candidate is None or is_loops(file)):
            candidate, is_kept_loops = (depth, inner, frame), is_loops(file)
        depth, inner, frame = depth + 1, frame, frame.f_back
    at, below, chosen = candidate or (0, start, start)
    return _Place(at, below.f_code, chosen.f_code, depth), chosen.f_lineno, False


class GroupCalls:
    """The calls of one group. All of them are made in one order, so that a number says which are done."""

    __slots__ = ("_append", "_places", "done", "name", "number", "ranks")

    def __init__(self, name: str, ranks: Sequence[int], append: Callable[[tuple[Any, ...]], None]) -> None:
        self.name, self.ranks = name, list(ranks)
        self.number = 0
        self.done = 0
        """The number of the last call that all ranks have entered."""
        self._append = append
        self._places: dict[bytes, list[_Place]] = {}

    def enter(self, call: bytes) -> None:
        """Note that a collective is entered: `call` is its name, operation, shape and dtype.

        Kept short, for what a step does in between has cleared the caches. Training repeats its calls: the frame is
        first looked for where it was before, as to walk through a stack makes an object of each frame.
        """
        self.number = number = self.number + 1
        for depth, code_inside, code, outermost in self._places.get(call, ()):
            try:
                inner = _getframe(depth)
                frame = inner.f_back
                if (
                    frame is not None
                    and frame.f_code is code
                    and inner.f_code is code_inside
                    and (not outermost or _getframe(outermost).f_back is None)
                ):
                    self._append((self, number, call, code, frame.f_lineno, now(), GRADIENTS.bucket))
                    return
            except ValueError:  # the stack is not that deep
                pass
        self._append((self, number, call, *self._locate(call, _getframe()), now(), GRADIENTS.bucket))

    def _locate(self, call: bytes, start: FrameType) -> tuple[CodeType, int]:
        """Return the code and line of the caller, and remember the place; no frame is kept alive."""
        location, line, is_users_line = _walk(start, _OWN_FRAMES)
        if threading.get_ident() == _MAIN.ident:
            if len(self._places) >= _MAX_PLACES:
                self._places.clear()
            others = [other for other in self._places.get(call, []) if other != location]
            # The nearest first, as in a walk; a place without a frame of the user's last.
            self._places[call] = sorted(
                [*others[: _PLACES_OF_ONE - 1], location], key=lambda other: (other[3], other[0])
            )
        elif not is_users_line and (main := sys._current_frames().get(_MAIN.ident or 0)) is not None:
            # A thread that communicates in the background works for the line at which the main thread is.
            location, line, _ = _walk(main, 0)
        return location.code, line

    def state(self, number: int, began: float) -> tuple[float, bool]:
        """Return when the rank began to wait in a call, and whether it is done."""
        return began, number <= self.done


class PairCalls(GroupCalls):
    """The messages of one tag from one rank to another, at either end. They may be waited for in any order."""

    __slots__ = ("_texts", "op", "peer", "waits")

    def __init__(
        self, name: str, ranks: Sequence[int], append: Callable[[tuple[Any, ...]], None], op: str, peer: int
    ) -> None:
        super().__init__(name, ranks, append)
        self.op, self.peer = op, peer
        self.waits: dict[int, float] = {}
        """Since when each message is waited for, by number; one whose wait ended with an error stays."""
        self._texts: dict[tuple[Any, Any], bytes] = {}

    def begin(self, shape: Any, dtype: Any) -> int:
        """Note that a message is sent or requested, and return its number."""
        call = self._texts.get((shape, dtype))
        if call is None:
            text = f"{self.op} of {tuple(shape)} {str(dtype).removeprefix('torch.')}"
            call = self._texts[shape, dtype] = text.encode()
        self.enter(call)
        return self.number

    def state(self, number: int, began: float) -> tuple[float, bool]:
        """Return when the rank began to wait for a message, and whether it does not wait for it."""
        return self.waits.get(number, began), number not in self.waits


class CallRing:
    """The latest calls of this process that torch does not record."""

    def __init__(self, size: int) -> None:
        self._calls: deque[tuple[Any, ...]] = deque(maxlen=size)
        self._groups: dict[str, GroupCalls] = {}

    def group(self, name: str, ranks: Sequence[int]) -> GroupCalls:
        """Return the calls of the group with a name that all of its ranks give, and its global ranks."""
        if name not in self._groups:
            self._groups[name] = GroupCalls(name, ranks, self._calls.append)
        return self._groups[name]

    def pair(self, name: str, ranks: Sequence[int], op: str, peer: int) -> PairCalls:
        """Return a new record of messages with a name that both ends give; it replaces an earlier one."""
        calls = self._groups[name] = PairCalls(name, ranks, self._calls.append, op, peer)
        return calls

    @property
    def groups(self) -> dict[str, list[int]]:
        """The global ranks of each group, by its name."""
        return {name: group.ranks for name, group in self._groups.items()}

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the calls as the ranks' records have them."""
        records = []
        for group, number, text, code, line, began, bucket in list(self._calls):
            op, *detail = _BEFORE_SHAPE.split(text.decode(errors="replace"), maxsplit=1)
            where = f"{os.path.basename(code.co_filename)}:{line}"
            call = {"group": group.name, "number": number, "op": op, "where": where, "bucket": bucket}
            detail = detail if op != "barrier" else []
            began, done = group.state(number, began)
            peer = group.peer if isinstance(group, PairCalls) else None
            records.append({**call, "detail": "".join(detail), "began": began, "done": done, "peer": peer})
        return records


@functools.cache
def call_ring() -> CallRing | None:
    """Return the ring of this process; None where nothing is recorded: no launcher of Phalanx started it."""
    size = os.environ.get(VARIABLE, "0")
    return CallRing(int(size)) if size.isdecimal() and int(size) > 0 else None
