"""Guarded output: a stream or file that fails (closed pipe, full disk) is dropped with one notice."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO, cast


class Guard:
    """Writes to one destination until a write fails, then drops it with one notice."""

    def __init__(self, name: str, notice: Callable[[str], object], drop: Callable[[], object] = lambda: None) -> None:
        """`name`: the destination in the notice, which `notice` shows; `drop` is called when a write has failed."""
        self._name = name
        self._notice = notice
        self._on_drop = drop
        self.lost = False

    def attempt(self, write: Callable[[], object]) -> None:
        """Call `write`, unless an earlier call failed."""
        if self.lost:
            return
        try:
            write()
        except OSError as error:
            self._drop(error.strerror or str(error))
        except ValueError as error:
            if "closed file" not in str(error):
                raise
            self._drop("it is closed")

    def _drop(self, why: str) -> None:
        self.lost = True
        self._on_drop()
        self._notice(f"{self._name} failed ({why}): nothing more is written there, the run continues")


class GuardedText:
    """A text stream behind a guard. Characters that its encoding lacks are replaced."""

    def __init__(self, stream: TextIO, name: str, notice: Callable[[str], object]) -> None:
        self._stream = stream
        self._guard = Guard(name, notice, lambda: discard_output(stream))

    def write(self, text: str) -> int:
        """Write, or drop the text where the stream has failed."""
        encoding = self._stream.encoding or "utf-8"
        fitting = text.encode(encoding, "replace").decode(encoding)
        self._guard.attempt(lambda: self._stream.write(fitting))
        return len(text)

    def flush(self) -> None:
        """Write out what is buffered."""
        self._guard.attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard_output(stream: TextIO) -> None:
    """Send what is still buffered in one of the process's own streams, and what follows, to /dev/null.

    Python would try to write it again when the process exits, and exit with an error.
    """
    if stream in (sys.__stdout__, sys.__stderr__) and not stream.closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def guarded_streams(out: TextIO | None = None, err: TextIO | None = None) -> tuple[TextIO, TextIO]:
    """Return standard output and error (or the given ones) behind guards; each reports the other's failure."""
    guarded_out = GuardedText(out or sys.stdout, "standard output", lambda text: _say(guarded_err, text))
    guarded_err = GuardedText(err or sys.stderr, "standard error", lambda text: _say(guarded_out, text))
    return cast("TextIO", guarded_out), cast("TextIO", guarded_err)


def say_to_user(text: str) -> None:
    """Write a notice to standard error, or to standard output where that fails."""
    _, err = guarded_streams()
    _say(err, text)


def _say(stream: GuardedText | TextIO, text: str) -> None:
    stream.write(f"phalanx: {text}\n")
    stream.flush()


class GuardedFile(io.FileIO):
    """A descriptor behind a guard, for a rank whose output goes straight into a file."""

    def __init__(self, descriptor: int, guard: Guard) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._guard = guard

    def write(self, data: Any, /) -> int:
        """Write, or drop the bytes where the file has failed."""
        written = memoryview(data).nbytes

        def write() -> None:
            nonlocal written
            written = super(GuardedFile, self).write(data)

        self._guard.attempt(write)
        return written


def guard_own_output(notice: Callable[[str], object]) -> None:
    """Put this process's standard output and error, which are one file, behind one guard."""
    guard = Guard("the log of this rank", notice)
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        old.flush()
        buffered = io.BufferedWriter(GuardedFile(old.fileno(), guard))
        fresh = io.TextIOWrapper(buffered, encoding=old.encoding, errors=old.errors, line_buffering=True)
        setattr(sys, name, fresh)
        setattr(sys, f"__{name}__", fresh)


class Streams(NamedTuple):
    """Where a console writes what ranks print to standard output and to standard error."""

    out_terminal: int | None = None
    """A descriptor of the terminal that standard output is; None where it is something else."""
    err_terminal: int | None = None
    same: bool = True
    """Whether both are one file: then one pipe carries both, and their order is kept."""

    @classmethod
    def of(cls, out: TextIO, err: TextIO) -> Streams:
        """Look at the files behind two text streams; a stream without a file is not a terminal."""
        first, second = (_descriptor(stream) for stream in (out, err))
        out_terminal, err_terminal = (end if end is not None and os.isatty(end) else None for end in (first, second))
        same = out is err or (first is not None and second is not None and os.path.sameopenfile(first, second))
        return cls(out_terminal, err_terminal, same)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def labelled_line(label: str, text: str) -> str:
    """Put a rank's label before its line; where ranks take turns, a part of a line ends like a line."""
    return f"[{label}] {text}" if text.endswith(("\n", "\r")) else f"[{label}] {text}\n"
