"""Heartbeats: each rank's step and time in a small shared file, cheap enough to write at every step.

The launcher makes the file; a rank writes its own 24 bytes through a memory map, so a beat costs no system call and
the last step is still there to read after the rank was killed. The progress bar reads it whenever it is drawn.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.host.files import replace_file

_ENTRY = struct.Struct("=qdq")
_PART = struct.Struct("=dq")
_PART_OFFSET = 8
_NEVER = -1


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of one rank: the step it was at, and when (seconds since the epoch)."""

    step: int
    time: float
    part: int = 0
    """How many batches of the evaluation under way are done."""


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def board_path(log_dir: Path, node_rank: int = 0) -> Path:
    """Return the path of a node's heartbeats: one file per node, because nodes may share the log directory."""
    return log_dir / ("heartbeats" if node_rank == 0 else f"heartbeats-{node_rank}")


class HeartbeatBoard:
    """One entry per global rank. A rank calls `beat`, the launcher reads."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._offset = rank * _ENTRY.size
        if self._offset + _ENTRY.size > len(self._map):
            raise IndexError(f"rank {rank} is not on the board {path}")

    @classmethod
    def create(cls, path: Path, world_size: int) -> HeartbeatBoard:
        """Make an empty board for `world_size` ranks; processes that have an old one open keep it.

        The next attempt reads from the old one how far this attempt came.
        """
        with suppress(FileNotFoundError):
            os.replace(path, _previous(path))
        replace_file(path, _ENTRY.pack(_NEVER, 0.0, 0) * world_size)
        return cls(path)

    def beat(self, step: int) -> None:
        """Write that this rank is alive and at `step`."""
        _ENTRY.pack_into(self._map, self._offset, step, time.time(), 0)

    def count(self, part: int) -> None:
        """Write that this rank is alive, and how many batches of an evaluation are done."""
        _PART.pack_into(self._map, self._offset + _PART_OFFSET, time.time(), part)

    def read(self, rank: int) -> Beat | None:
        """Return the last beat of `rank`, or None when it never gave one."""
        step, when, part = _ENTRY.unpack_from(self._map, rank * _ENTRY.size)
        return None if step == _NEVER else Beat(step, when, part)

    def close(self) -> None:
        """Close the file."""
        self._map.close()


class LocalBoard:
    """The board of a process that no launcher started: only the process itself can read it."""

    def __init__(self) -> None:
        self._beat: Beat | None = None

    def beat(self, step: int) -> None:
        """Keep the step."""
        self._beat = Beat(step, time.time())

    def count(self, part: int) -> None:
        """Keep how many batches of an evaluation are done."""
        if self._beat is not None:
            self._beat = Beat(self._beat.step, time.time(), part)

    def read(self, rank: int) -> Beat | None:
        """Return the last beat of this process, whose rank it is; None when it never gave one."""
        return self._beat

    def close(self) -> None:
        """Do nothing: this board has no file to close."""


Board = HeartbeatBoard | LocalBoard
_LOCAL = LocalBoard()


@functools.cache
def _open(log_dir: str, node_rank: str, rank: str) -> Board:
    path = board_path(Path(log_dir), int(node_rank))
    return HeartbeatBoard(path, int(rank)) if path.exists() else _LOCAL


def previous_beat() -> Beat | None:
    """Return the last beat of the main rank in the attempt before this one, where this node's launcher has kept it."""
    log_dir = os.environ.get("PHALANX_LOG_DIR", "")
    path = _previous(board_path(Path(log_dir), int(os.environ.get("GROUP_RANK", "0"))))
    if not log_dir or not path.is_file():
        return None
    board = HeartbeatBoard(path)
    try:
        return board.read(0)
    finally:
        board.close()


def current() -> Board:
    """Return this rank's board, or one of its own when no launcher made any. Ask once, not at every step."""
    log_dir = os.environ.get("PHALANX_LOG_DIR", "")
    if not log_dir:
        return _LOCAL
    # The number of the process: its rank may change while it runs.
    slot = os.environ.get("PHALANX_SLOT") or os.environ.get("RANK", "0")
    return _open(log_dir, os.environ.get("GROUP_RANK", "0"), slot)
