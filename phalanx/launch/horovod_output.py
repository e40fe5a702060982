"""horovodrun's output, taken apart: lines of ranks, which carry their number, and words of its own."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from phalanx.launch.output import open_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
_OF_RANK = re.compile(rb"\[(?:\d+,)?(\d+)\]<(?:stdout|stderr)>:(.*)", re.DOTALL)
"""horovodrun writes [rank], Open MPI [job,rank]."""
_ENDED = re.compile(r"Process (\d+) exit with status code (\d+)")
_OWN_LINES = 60
_SHELLS_WORDS = ("Terminated", "Killed")
"""What the shell around a rank says when the rank was killed: our report says it better."""


class HorovodOutput:
    """Every rank's lines go to its log and to `show`; what horovodrun says itself is kept."""

    def __init__(self, log_dir: Path, show: Callable[[int, str], None], on_exit: Callable[[int, int], None]) -> None:
        self._log_dir = log_dir
        self._show = show
        self._on_exit = on_exit
        self._logs: dict[int, int] = {}
        self._partial = b""
        self.own: list[str] = []
        """The last lines of horovodrun's own."""

    def feed(self, data: bytes) -> None:
        """Take what came, and pass on the lines that are complete."""
        text, end = self._partial + data, 0
        for match in _LINE.finditer(text):
            self._take(match[0])
            end = match.end()
        self._partial = text[end:]

    def close(self) -> None:
        """Pass on the rest, and close the logs."""
        if self._partial:
            self._take(self._partial + b"\n")
        self._partial = b""
        for log in self._logs.values():
            os.close(log)
        self._logs.clear()

    def _take(self, line: bytes) -> None:
        of_rank = _OF_RANK.match(line)
        if of_rank is None:
            self._take_own(line.decode(errors="replace").rstrip())
            return
        rank, said = int(of_rank[1]), of_rank[2]
        os.write(self._log(rank), said)
        text = said.rstrip(b"\r\n").decode(errors="replace")
        if text in _SHELLS_WORDS:
            return
        self._show(rank, f"{text}\r" if said.endswith(b"\r") else text)

    def _take_own(self, line: str) -> None:
        self.own = [*self.own, line][-_OWN_LINES:] if line else self.own
        ended = _ENDED.match(line)
        if ended is not None:
            self._on_exit(int(ended[1]), int(ended[2]))

    def _log(self, rank: int) -> int:
        if rank not in self._logs:
            self._logs[rank] = open_log(self._log_dir, rank)
        return self._logs[rank]
