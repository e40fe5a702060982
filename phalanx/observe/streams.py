"""What a console writes to: terminals, pipes or files, together or apart."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO


@dataclass(frozen=True)
class Streams:
    """Where a console writes what ranks print to standard output and to standard error."""

    out_terminal: int | None = None
    """A descriptor of the terminal that standard output is; None where it is something else."""
    err_terminal: int | None = None
    same: bool = True
    """Whether both lead to one place: then one pipe carries both, and their order is kept."""

    @classmethod
    def of(cls, out: TextIO, err: TextIO) -> Streams:
        """Look at the files behind two text streams; a stream without a file is not a terminal."""
        ends = [_descriptor(stream) for stream in (out, err)]
        out_terminal, err_terminal = (end if end is not None and os.isatty(end) else None for end in ends)
        return cls(out_terminal, err_terminal, out is err or _is_one_file(*ends))


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _is_one_file(first: int | None, second: int | None) -> bool:
    if first is None or second is None:
        return False
    return os.path.sameopenfile(first, second)


def labelled_line(label: str, text: str) -> str:
    """Put a rank's label before its line; where ranks take turns, a part of a line ends like a line."""
    return f"[{label}] {text}" if text.endswith(("\n", "\r")) else f"[{label}] {text}\n"
