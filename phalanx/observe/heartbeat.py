"""Heartbeats: each rank's step, time and gauges in a small shared file, cheap enough to write at every step.

The launcher makes the file; a rank writes its own entry through a memory map, so a beat costs no system call and
the last step is still there to read after the rank was killed. The progress bar reads it whenever it is drawn, and
`phalanx top`, the metrics endpoint and the main rank read the gauges of all ranks.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

from phalanx.host.files import replace_file
from phalanx.host.processes import cpu_seconds

_BEAT = struct.Struct("=qqdq")  # step, activity, time, part
_ACTIVITY = struct.Struct("=qd")
_PART = struct.Struct("=dq")
_TIME = struct.Struct("=d")
_ACTIVITY_OFFSET, _TIME_OFFSET = 8, 16
_CALLBACKS = ("on_fit_start", "on_step_end", "on_epoch_end", "on_checkpoint", "on_training_end", "on_fit_end")
ACTIVITIES = {activity: number for number, activity in enumerate(("", *_CALLBACKS, "a save"))}
"""Where a rank can be between steps for as long as the user's code or a disk takes; the first one is nowhere."""
_BY_NUMBER = tuple(ACTIVITIES)
BOARD_VARIABLE = "PHALANX_HEARTBEATS"
"""The path of a rank's board: its node may get another number while it runs."""
_BUSY_SECONDS = 1.0
_BUSY_SHARE = 0.2
"""Of one core: a process that only polls for others uses less."""
_NEVER = -1
_UNKNOWN = math.nan


@dataclass(frozen=True)
class Gauges:
    """What a rank measures about itself about once per second; NaN where something is not known or not counted."""

    samples_per_second: float = _UNKNOWN
    """Of this rank alone."""
    step_seconds: float = _UNKNOWN
    data_wait: float = _UNKNOWN
    """The share of the time since the last gauges, from 0 to 1; likewise `communication`."""
    communication: float = _UNKNOWN
    """The share in which it waited for other ranks, where the strategy counts that."""
    own_seconds: float = _UNKNOWN
    """Seconds per step of data and forward passes, which wait for no other rank that holds a replica."""
    memory: float = _UNKNOWN
    """Peak bytes, of the device on CUDA, of the process on the CPU."""
    memory_limit: float = _UNKNOWN
    """What the device has, or on the CPU this rank's share of the machine."""
    gpu_utilization: float = _UNKNOWN
    """From 0 to 1."""
    gpu_memory: float = _UNKNOWN
    gpu_power: float = _UNKNOWN
    """Watts."""
    gpu_temperature: float = _UNKNOWN
    """Degrees Celsius."""
    data_wait_seconds: float = _UNKNOWN
    """Since the attempt began; likewise `communication_seconds`."""
    communication_seconds: float = _UNKNOWN
    cpu_cores: float = _UNKNOWN
    """Cores that the process kept busy, without the processes that load its data."""

    def known(self) -> dict[str, float]:
        """Return the values that are known, by name."""
        return {name: value for name, value in asdict(self).items() if not math.isnan(value)}


_GAUGES = struct.Struct(f"={len(fields(Gauges))}d")
_NO_GAUGES = Gauges()
_ENTRY_BYTES = _BEAT.size + _GAUGES.size
_EMPTY = _BEAT.pack(_NEVER, 0, 0.0, 0) + _GAUGES.pack(*astuple(_NO_GAUGES))


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of one rank: the step it was at, and when (seconds since the epoch)."""

    step: int
    time: float
    part: int = 0
    """How many batches of the evaluation under way are done."""
    gauges: Gauges = _NO_GAUGES


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def board_path(log_dir: Path, node_rank: int = 0) -> Path:
    """Return the path of a node's heartbeats: one file per node, because nodes may share the log directory."""
    return log_dir / ("heartbeats" if node_rank == 0 else f"heartbeats-{node_rank}")


_MADE_HERE: dict[Path, Path] = {}
"""The board that this process made, by log folder: on the launcher of a node that of its own ranks."""


class HeartbeatBoard:
    """One entry per global rank. A rank calls `beat`, the launcher reads."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._offset = rank * _ENTRY_BYTES
        if self._offset + _ENTRY_BYTES > len(self._map):
            raise IndexError(f"rank {rank} is not on the board {path}")
        self._activity = ""

    @classmethod
    def create(cls, path: Path, world_size: int) -> HeartbeatBoard:
        """Make an empty board for `world_size` ranks; processes that have an old one open keep it.

        The next attempt reads from the old one how far this attempt came.
        """
        with suppress(FileNotFoundError):
            os.replace(path, _previous(path))
        replace_file(path, _EMPTY * world_size)
        _MADE_HERE[path.parent.resolve()] = path
        return cls(path)

    def beat(self, step: int) -> None:
        """Write that this rank is alive and at `step`."""
        _BEAT.pack_into(self._map, self._offset, step, 0, time.time(), 0)

    def gauge(self, gauges: Gauges) -> None:
        """Write what this rank measured about itself."""
        _GAUGES.pack_into(self._map, self._offset + _BEAT.size, *astuple(gauges))

    def __len__(self) -> int:
        return len(self._map) // _ENTRY_BYTES

    def count(self, part: int) -> None:
        """Write that this rank is alive, and how many batches of an evaluation are done."""
        _PART.pack_into(self._map, self._offset + _TIME_OFFSET, time.time(), part)

    def alive(self) -> None:
        """Write that this rank makes progress within a step, or before its first one."""
        _TIME.pack_into(self._map, self._offset + _TIME_OFFSET, time.time())

    def enter(self, activity: str) -> str:
        """Write which of `ACTIVITIES` this rank is in from now on; return the one before. Called by the main thread."""
        before, self._activity = self._activity, activity
        _ACTIVITY.pack_into(self._map, self._offset + _ACTIVITY_OFFSET, ACTIVITIES[activity], time.time())
        return before

    def activity(self, rank: int) -> str:
        """Return which of `ACTIVITIES` a rank is in."""
        return _BY_NUMBER[int(_ACTIVITY.unpack_from(self._map, rank * _ENTRY_BYTES + _ACTIVITY_OFFSET)[0])]

    def last_progress(self, rank: int) -> float:
        """Return when `rank` last wrote anything, also before its first step; 0 for never."""
        return float(_TIME.unpack_from(self._map, rank * _ENTRY_BYTES + _TIME_OFFSET)[0])

    def read(self, rank: int) -> Beat | None:
        """Return the last beat of `rank`, or None when it never gave one."""
        offset = rank * _ENTRY_BYTES
        step, _, when, part = _BEAT.unpack_from(self._map, offset)
        if step == _NEVER:
            return None
        return Beat(step, when, part, Gauges(*_GAUGES.unpack_from(self._map, offset + _BEAT.size)))

    def close(self) -> None:
        """Close the file."""
        self._map.close()


class LocalBoard:
    """The board of a process that no launcher started: only the process itself can read it."""

    def __init__(self) -> None:
        self._step, self._time, self._part, self._gauges = _NEVER, 0.0, 0, _NO_GAUGES
        self._activity = ""

    def beat(self, step: int) -> None:
        """Keep the step."""
        self._step, self._time, self._part = step, time.time(), 0

    def count(self, part: int) -> None:
        """Keep how many batches of an evaluation are done."""
        self._time, self._part = time.time(), part

    def alive(self) -> None:
        """Keep when this process made progress."""
        self._time = time.time()

    def enter(self, activity: str) -> str:
        """Keep where this process is, and return where it was."""
        before, self._activity = self._activity, activity
        return before

    def gauge(self, gauges: Gauges) -> None:
        """Keep what this rank measured about itself."""
        self._gauges = gauges

    def read(self, rank: int) -> Beat | None:
        """Return the last beat of this process, whose rank it is; None when it never gave one."""
        return None if self._step == _NEVER else Beat(self._step, self._time, self._part, self._gauges)

    def close(self) -> None:
        """Do nothing: this board has no file to close."""


Board = HeartbeatBoard | LocalBoard
_LOCAL = LocalBoard()


@functools.cache
def _open(path: str, rank: str) -> Board:
    return HeartbeatBoard(Path(path), int(rank)) if os.path.exists(path) else _LOCAL


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
    path = os.environ.get(BOARD_VARIABLE) or board_path(Path(log_dir), int(os.environ.get("GROUP_RANK", "0")))
    return _open(str(path), slot)


@contextmanager
def within(activity: str, board: Board) -> Iterator[None]:
    """Let this rank be in one of `ACTIVITIES` for the block: then it is alive although it takes no step."""
    before = board.enter(activity)
    try:
        yield
    finally:
        board.enter(before)


class BusyBeat:
    """Beats about once per second, between `begin` and `end`, while this process and those it started use the CPU.

    For what computes long without a batch or a step: building a model, compiling.
    """

    def __init__(self) -> None:
        self._ended: threading.Event | None = None

    def begin(self) -> None:
        """Start, unless it was started."""
        if self._ended is None:
            self._ended = threading.Event()
            watched = (self._ended, current())
            threading.Thread(target=self._watch, args=watched, name="phalanx-busy", daemon=True).start()

    def end(self) -> None:
        """Stop, if it was started."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def _watch(self, ended: threading.Event, board: Board) -> None:
        used, moment = cpu_seconds(), time.monotonic()
        while not ended.wait(_BUSY_SECONDS):
            before, since = used, moment
            used, moment = cpu_seconds(), time.monotonic()
            if used - before > _BUSY_SHARE * (moment - since):
                board.alive()


def read_beats(log_dir: Path, *, is_local: bool = False) -> dict[int, Beat]:
    """Return the last beat of every rank of a run, from the files of all nodes that share its log folder.

    A node's file has entries for all ranks, and beats for its own. `is_local`: only the file that this process made.
    """
    beats: dict[int, Beat] = {}
    local = _MADE_HERE.get(log_dir.resolve()) if is_local else None
    for path in _boards(log_dir) if local is None else [local]:
        with suppress(OSError, ValueError), closing(HeartbeatBoard(path)) as board:  # it is being replaced
            for rank in range(len(board)):
                beat = board.read(rank)
                if beat is not None and (rank not in beats or beats[rank].time < beat.time):
                    beats[rank] = beat
    return dict(sorted(beats.items()))


def _boards(log_dir: Path) -> Iterator[Path]:
    yield from (path for path in log_dir.glob("heartbeats*") if path.suffix != ".previous")
