"""The latest collectives of this process: what was called, in which group, from which line, and whether it ended.

torch's flight recorder keeps those of gloo and nccl (`TORCH_FR_BUFFER_SIZE`, which the launcher sets); the ring here
keeps those that torch does not see, in shared memory and over point-to-point messages. Both are compared between ranks
when a run hangs.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterable
from types import CodeType
from typing import Any

from phalanx.host.processes import PACKAGE

VARIABLE = "TORCH_FR_BUFFER_SIZE"
"""How many collectives are kept, by torch and here; 0: none."""
KEPT = 1000
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")}
    | {os.path.join(PACKAGE, ""), "<frozen", "<string>"}
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_BELOW = tuple(os.path.join(PACKAGE, name, "") for name in ("comm", "launch", "observe", "world", "host"))


@functools.cache
def is_users(file: str) -> bool:
    """Whether a source file is neither the standard library's, an installed package's nor Phalanx's."""
    return not file.startswith(_LIBRARIES) and not any(part in file for part in _PACKAGES)


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


@functools.cache
def _is_users_code(code: CodeType) -> bool:
    return is_users(code.co_filename)


def _caller() -> list[tuple[CodeType, int]]:
    """Return the frames down to the user's code, innermost first: cheap, and no frame is kept alive."""
    frame = sys._getframe(2)
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        if _is_users_code(frame.f_code):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return found


class CallRing:
    """The latest calls of this process that torch does not record."""

    def __init__(self, kept: int) -> None:
        self._calls: deque[list[Any]] = deque(maxlen=kept)
        self._numbers: dict[str, int] = {}
        self.groups: dict[str, list[int]] = {}
        """The global ranks of each group, by its name."""

    def enter(self, group: str, what: bytes) -> list[Any]:
        """Note that a collective is entered: `what` is its name, operation, shape and dtype."""
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        call = [group, number, what, _caller(), time.time(), False]
        self._calls.append(call)
        return call

    def leave(self, call: list[Any]) -> None:
        """Note that all ranks have entered it."""
        call[-1] = True

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the calls as the ranks' records have them."""
        return [
            {
                "group": group,
                "number": number,
                "op": what.decode(errors="replace").partition(" of ")[0],
                "detail": what.decode(errors="replace").partition(" of ")[2],
                "where": pick_line((code.co_filename, line) for code, line in frames),
                "began": began,
                "done": done,
            }
            for group, number, what, frames, began, done in list(self._calls)
        ]


@functools.cache
def call_ring() -> CallRing | None:
    """Return the ring of this process; None where nothing is recorded: no launcher of Phalanx started it."""
    given = os.environ.get(VARIABLE, "0")
    return CallRing(int(given)) if given.isdecimal() and int(given) > 0 else None
