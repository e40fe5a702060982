"""Split horovodrun's output into lines of ranks, which carry their number, and its own lines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from phalanx.launch.output import RankLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_END = re.compile(rb"\r\n|\n|\r")
_LONGEST = 1 << 20
_OF_RANK = re.compile(rb"\[(?:\d+,)?(\d+)\]<(?:stdout|stderr)>:(.*)", re.DOTALL)
"""horovodrun writes [rank], Open MPI [job,rank]."""
_ENDED = re.compile(r"Process (\d+) exit with status code (\d+)")
_OWN_LINES = 60
_SHELL_MESSAGES = ("Terminated", "Killed")
"""What the shell around a rank prints when the rank was killed: the report says more."""


class HorovodOutput:
    """Every rank's lines go to its log and to `show`; horovodrun's own last lines are kept."""

    def __init__(
        self,
        log_dir: Path,
        show: Callable[[int, str], None],
        on_exit: Callable[[int, int], None],
        tell: Callable[[str], None],
    ) -> None:
        self._log_dir = log_dir
        self._show = show
        self._on_exit = on_exit
        self._tell = tell
        self._logs: dict[int, RankLog] = {}
        self._partial = b""
        self.own: list[str] = []
        """The last lines of horovodrun's own."""

    def feed(self, data: bytes) -> None:
        """Process output; lines that are complete are passed on."""
        begun, start = self._partial, 0
        for end in _END.finditer(data):
            self._take(begun + data[start : end.end()])
            begun, start = b"", end.end()
        self._partial = begun + data[start:]
        if len(self._partial) > _LONGEST:
            self._take(self._partial)
            of_rank = _OF_RANK.match(self._partial)
            self._partial = self._partial[: of_rank.start(2)] if of_rank else b""

    def close(self) -> None:
        """Pass on the rest, and close the logs."""
        if self._partial:
            self._take(self._partial + b"\n")
        self._partial = b""
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _take(self, line: bytes) -> None:
        of_rank = _OF_RANK.match(line)
        if of_rank is None:
            self._take_own(line.decode(errors="replace").rstrip())
            return
        rank, said = int(of_rank[1]), of_rank[2]
        self._log(rank).write(said)
        text = said.decode(errors="replace")
        if text.rstrip() not in _SHELL_MESSAGES:
            self._show(rank, text)

    def _take_own(self, line: str) -> None:
        self.own = [*self.own, line][-_OWN_LINES:] if line else self.own
        ended = _ENDED.match(line)
        if ended is not None:
            self._on_exit(int(ended[1]), int(ended[2]))

    def _log(self, rank: int) -> RankLog:
        if rank not in self._logs:
            self._logs[rank] = RankLog(self._log_dir, rank, self._tell)
        return self._logs[rank]
