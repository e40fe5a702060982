"""Rank output: log files, line splitting, the console, and the thread-free pump that forwards it."""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import os
import re
import termios
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from phalanx.observe.guard import Guard, Streams, guarded_streams, labelled_line

_CHUNK = 1 << 14
"""How much is read at a time: between two reads the launcher serves signals and other ranks."""
_PIPE_BYTES = 1 << 20
"""More than a pipe holds: what is still read after all writers should have ended."""
_LONGEST = 1 << 16
"""How much of a line without an end is kept back."""
_NOISE = re.compile(
    r"(\[rank\d+\]:)?\[?[WEF]\d{4} [\d:.]+ .*"
    r"\b(ProcessGroup\w*|NCCLUtils|TCPStore\w*|socket|FlightRecorder\w*|TraceUtils)\.[ch]pp:\d+\]"
    r"|.*\b(ProcessGroupNCCL|NCCLUtils)\.[ch]pp:\d+\]"  # anywhere: threads write into each other's lines
    r"|\S+:\d+:\d+ \[\d+\] .*\bNCCL WARN "
    r"|frame #\d+: .*[(\[]0x[\da-f]+( in \S+\)|\])$|Exception raised from .*\(most recent call first\):"
    r"|terminate called (after throwing an instance of '(c10|gloo)::|recursively)|  what\(\):  \[(PG|enforce) "
)
"""What the C++ code of torch and nccl prints around a lost rank or a hang: for the log. The launcher names a cause."""
_AFTER_NOISE = re.compile(
    r"(frame )?#\d+:? \S|$"
    r"|nccl\w+: |Last error:$|socket\w*: |Search for `cuda|CUDA kernel errors might be asynchronously reported"
    r"|For debugging consider passing CUDA_LAUNCH_BLOCKING|Compile with `TORCH_USE_CUDA_DSA`"
)
"""Other frames, the rest of NCCL's and CUDA's messages and empty lines, which belong to it only if they follow it: a
program may print such lines."""
_END = re.compile(r"\r\n|\n|\r")
_TAIL_BYTES = 1 << 16
_SIZE_BYTES = 8


def log_path(log_dir: Path, rank: int) -> Path:
    """Return where a rank's output goes."""
    return log_dir / f"rank-{rank}.log"


def open_log(log_dir: Path, rank: int) -> int:
    """Open a rank's log for appending: the rank and the supervisor may both write to it."""
    return os.open(log_path(log_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def log_tail(log_dir: Path, rank: int, lines: int = 200) -> tuple[str, ...]:
    """Return the last lines of a rank's log."""
    path = log_path(log_dir, rank)
    if not path.exists():
        return ()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return tuple(file.read().decode(errors="replace").splitlines()[-lines:])


class LineSplitter:
    """Cuts what ranks print into lines, each with its end. A very long line comes in parts, of which the last has one.

    `eager`: a line's beginning is not kept back at all, for a terminal that shows prompts and progress bars.
    """

    def __init__(self, *, eager: bool = False) -> None:
        self._keeps = 0 if eager else _LONGEST
        self._partial: dict[int, str] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = defaultdict(
            lambda: codecs.getincrementaldecoder("utf-8")("replace")
        )

    def split(self, rank: int, chunk: bytes) -> Iterator[str]:
        """Yield the lines that are complete with this piece."""
        text = self._decoders[rank].decode(chunk)
        begun, start = self._partial.pop(rank, ""), 0
        for end in _END.finditer(text):
            yield begun + text[start : end.end()]
            begun, start = "", end.end()
        begun += text[start:]
        if len(begun) > self._keeps:
            yield begun
        else:
            self._partial[rank] = begun

    def rest(self) -> Iterator[tuple[int, str]]:
        """Yield what came without a line's end, by rank."""
        for rank, text in self._partial.items():
            if text:
                yield rank, text
        self._partial.clear()


class RankLog:
    """A rank's log file; when it cannot be written any more it is dropped with one notice."""

    def __init__(self, log_dir: Path, rank: int, notice: Callable[[str], object]) -> None:
        self.descriptor = open_log(log_dir, rank)
        self._guard = Guard(f"the log of rank {rank} in {log_dir}", notice)

    def write(self, data: bytes) -> None:
        """Append."""

        def write_all() -> None:
            rest = data
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]

        self._guard.attempt(write_all)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


class OutputPump:
    """The read end of what a rank prints. Bytes go to the log as they are, lines to the console.

    `terminal`: the descriptor of the console's terminal. The rank then writes to a terminal of the same size, so that
    its libraries draw what they would draw there.
    """

    def __init__(
        self,
        rank: int,
        label: str,
        log: RankLog,
        console: RankConsole,
        *,
        err: bool = False,
        terminal: int | None = None,
    ) -> None:
        self._rank, self._label, self._err = rank, label, err
        self._log, self._console, self._terminal = log, console, terminal
        self._lines = LineSplitter(eager=terminal is not None)
        self._in_noise = False
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC) if terminal is None else _open_terminal()
        self.resize()
        os.set_blocking(self._read, False)

    def fileno(self) -> int:
        """Let selectors wait for output."""
        return self._read

    def close_write_end(self) -> None:
        """Leave the writing to the rank."""
        os.close(self.write_end)

    def resize(self) -> None:
        """Give the rank's terminal the size of the console's."""
        if self._terminal is not None:
            with contextlib.suppress(OSError):  # a terminal that has been closed has no size
                size = fcntl.ioctl(self._terminal, termios.TIOCGWINSZ, bytes(_SIZE_BYTES))
                fcntl.ioctl(self._read, termios.TIOCSWINSZ, size)

    def pump(self) -> bool:
        """Pass on a part of what there is; return False at the end of the output."""
        try:
            chunk = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno != errno.EIO:  # how a terminal reports that its last writer has ended
                raise
            return False
        self._log.write(chunk)
        for line in self._lines.split(self._rank, chunk):
            self._show(line)
        return bool(chunk)

    def _show(self, text: str) -> None:
        line = text.rstrip()
        self._in_noise = bool(_NOISE.match(line) or (self._in_noise and _AFTER_NOISE.match(line)))
        if self._in_noise:
            return
        self._console.rank_output(self._rank, self._label, text, err=self._err)

    def close(self) -> None:
        """Pass on what is left, the last line with or without its newline, and close the read end."""
        for _ in range(_PIPE_BYTES // _CHUNK):
            if not self.pump():
                break
        for _, line in self._lines.rest():
            self._show(f"{line}\n")
        os.close(self._read)


def _open_terminal() -> tuple[int, int]:
    """Make a terminal that changes nothing of what is written to it; the console's terminal does that."""
    read_end, write_end = os.openpty()
    settings = termios.tcgetattr(write_end)
    settings[1] &= ~termios.OPOST
    settings[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(write_end, termios.TCSANOW, settings)
    return read_end, write_end


class RankConsole(Protocol):
    """Where the supervisor shows output, events and notices. Called from the supervisor's thread only."""

    streams: Streams

    def rank_output(self, rank: int, label: str, text: str, *, err: bool = False) -> None:
        r"""Show a line that a rank printed, with its end: "\n", "\r\n", or "\r" where it will be redrawn.

        A text without an end is the beginning of a line whose rest follows. `err`: it came from standard error.
        """

    def handle(self, event: dict[str, Any]) -> None:
        """Handle one event of a rank: a dict with an "event" key."""

    def notice(self, text: str) -> None:
        """Show a message of the launcher."""


class PlainConsole:
    """Prints rank output as it is (labelled when several ranks are shown) and notices to stderr."""

    def __init__(self, *, labelled: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._labelled = labelled
        self._out, self._err = guarded_streams(out, err)
        self.streams = Streams.of(self._out, self._err)

    def rank_output(self, rank: int, label: str, text: str, *, err: bool = False) -> None:
        """Print the text; keep a redrawn line on the same row of the terminal."""
        self._write(self._err if err else self._out, labelled_line(label, text) if self._labelled else text)

    def handle(self, event: dict[str, Any]) -> None:
        """Ignore events: they are for consoles that draw."""

    def notice(self, text: str) -> None:
        """Print to stderr, so that piped output is the ranks' alone."""
        self._write(self._err, f"phalanx: {text}\n")

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()
