"""A rank's output on its way to its log file and, line by line, to the console."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from phalanx.launch.console import Console

_CHUNK = 1 << 16
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?=.)|\r$)", re.DOTALL)
_TAIL_BYTES = 1 << 16


def log_path(log_dir: Path, rank: int) -> Path:
    """Return where a rank's output goes."""
    return log_dir / f"rank-{rank}.log"


def open_log(log_dir: Path, rank: int) -> int:
    """Open a rank's log for appending: the rank and the supervisor may both write to it."""
    return os.open(log_path(log_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def log_tail(log_dir: Path, rank: int, lines: int = 40) -> tuple[str, ...]:
    """Return the last lines of a rank's log."""
    path = log_path(log_dir, rank)
    if not path.exists():
        return ()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return tuple(file.read().decode(errors="replace").splitlines()[-lines:])


class LineSplitter:
    """Cuts what ranks print into lines, as it comes in pieces; a trailing carriage return stays on a line."""

    def __init__(self) -> None:
        self._partial: dict[int, bytes] = {}

    def split(self, rank: int, chunk: bytes) -> Iterator[str]:
        """Yield the lines that are complete with this piece."""
        text = self._partial.get(rank, b"") + chunk
        end = 0
        for match in _LINE.finditer(text):
            end = match.end()
            yield _as_text(match[0])
        self._partial[rank] = text[end:]

    def rest(self) -> Iterator[tuple[int, str]]:
        """Yield what came without a line's end, by rank."""
        for rank, text in self._partial.items():
            if text:
                yield rank, _as_text(text)
        self._partial.clear()


def _as_text(line: bytes) -> str:
    text = line.rstrip(b"\r\n").decode(errors="replace")
    return f"{text}\r" if line.endswith(b"\r") else text


class OutputPump:
    """The read end of a rank's stdout and stderr. Bytes go to the log as they are, lines to the console."""

    def __init__(self, rank: int, label: str, log: int, console: Console) -> None:
        self._rank = rank
        self._label = label
        self._log = log
        self._console = console
        self._lines = LineSplitter()
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)

    def fileno(self) -> int:
        """Let selectors wait for output."""
        return self._read

    def close_write_end(self) -> None:
        """Leave the writing to the rank."""
        os.close(self.write_end)

    def pump(self) -> bool:
        """Pass on what there is; return False at the end of the output."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._read, _CHUNK):
                os.write(self._log, chunk)
                self._show(chunk)
            return False
        return True

    def _show(self, chunk: bytes) -> None:
        for line in self._lines.split(self._rank, chunk):
            self._console.rank_output(self._rank, self._label, line)

    def close(self) -> None:
        """Pass on the rest, with or without its newline, and let go."""
        self.pump()
        for _, line in self._lines.rest():
            self._console.rank_output(self._rank, self._label, line)
        os.close(self._read)
        os.close(self._log)
