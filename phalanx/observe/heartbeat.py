"""Heartbeats: each rank's step and time in a small shared file, cheap enough to write at every step.

The launcher makes the file; a rank writes its own 16 bytes through a memory map, so a beat costs no system call and
the last step is still there to read after the rank was killed.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.host.files import replace_file

_ENTRY = struct.Struct("=qd")
_NEVER = -1


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of one rank: the step it was at, and when (seconds since the epoch)."""

    step: int
    time: float


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
        """Make an empty board for `world_size` ranks; processes that have an old one open keep it."""
        replace_file(path, _ENTRY.pack(_NEVER, 0.0) * world_size)
        return cls(path)

    def beat(self, step: int) -> None:
        """Write that this rank is alive and at `step`."""
        _ENTRY.pack_into(self._map, self._offset, step, time.time())

    def read(self, rank: int) -> Beat | None:
        """Return the last beat of `rank`, or None when it never gave one."""
        step, when = _ENTRY.unpack_from(self._map, rank * _ENTRY.size)
        return None if step == _NEVER else Beat(step, when)

    def close(self) -> None:
        """Close the file."""
        self._map.close()


class SilentBoard:
    """A board that does nothing, where no launcher reads."""

    def beat(self, step: int) -> None:
        """Do nothing."""

    def read(self, rank: int) -> Beat | None:
        """Return None."""
        return None


@functools.cache
def _open(log_dir: str, node_rank: str, rank: str) -> HeartbeatBoard | SilentBoard:
    path = board_path(Path(log_dir), int(node_rank))
    return HeartbeatBoard(path, int(rank)) if path.exists() else SilentBoard()


def current() -> HeartbeatBoard | SilentBoard:
    """Return this rank's board, or one that does nothing when no launcher made any. Ask once, not at every step."""
    log_dir = os.environ.get("PHALANX_LOG_DIR", "")
    if not log_dir:
        return SilentBoard()
    return _open(log_dir, os.environ.get("GROUP_RANK", "0"), os.environ.get("RANK", "0"))
