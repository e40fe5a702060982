"""How a rank ended: its exit code, its traceback without the launcher's frames, and a record for the launcher."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.host.files import replace_file
from phalanx.host.lost_peers import is_of_collectives
from phalanx.host.messages import Message
from phalanx.observe import heartbeat

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
LAUNCHER_FILES = (
    os.path.join(_PACKAGE, "launch", ""),
    os.path.join(_PACKAGE, "engines", "horovod", "rank.py"),
    os.path.join(_PACKAGE, "engines", "ray", "worker.py"),
)
"""Frames of these files lie around every target: reports leave them out."""


def record_path(log_dir: Path, rank: int) -> Path:
    """Return the path of the error record of a rank."""
    return log_dir / f"rank-{rank}.error.json"


def exit_code_of(error: BaseException) -> int:
    """Return the exit status that Python gives for an uncaught exception; a PhalanxError has its own."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else 1
    if isinstance(error, PhalanxError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def record_exception(error: BaseException, request: Message) -> None:
    """Write the record for the launcher, then the traceback to stderr as the interpreter would."""
    error.__traceback__ = user_frames(error.__traceback__)
    lines = [] if isinstance(error, PhalanxError) else users_traceback(error)
    beat = heartbeat.current().read(request["rank"])
    record = {
        "rank": request["rank"],
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "step": beat.step if beat else None,
        "type": type(error).__qualname__,
        "message": error.message if isinstance(error, PhalanxError) else str(error),
        "hint": error.hint if isinstance(error, PhalanxError) else "",
        "exit_code": exit_code_of(error),
        "of_collectives": is_of_collectives(error),
        "traceback": lines,
    }
    path = record_path(Path(request["log_dir"]), request["rank"])
    try:
        replace_file(path, json.dumps(record))
    except OSError as problem:  # a full disk must not hide the exception that is being recorded
        print(f"cannot write {path}: {problem}", file=sys.stderr)
    if isinstance(error, PhalanxError):
        print(error, file=sys.stderr)
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop the frames of the launcher, and of runpy and importlib, from the top of a traceback."""
    while frames is not None and _is_launchers(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


def users_traceback(error: BaseException) -> list[str]:
    """Return the lines of an exception's traceback from the first frame outside Phalanx; the log has all of it."""
    summary = traceback.TracebackException.from_exception(error)
    _cut_library_frames(summary)
    return "".join(summary.format()).splitlines()


def _cut_library_frames(summary: traceback.TracebackException | None) -> None:
    """Cut the leading frames of this package, in the exceptions before this one too; if nothing else follows, none."""
    if summary is None:
        return
    kept = list(
        itertools.dropwhile(
            lambda frame: frame.filename.startswith(_PACKAGE) or _is_launchers(frame.filename), summary.stack
        )
    )
    if kept:
        summary.stack[:] = kept
    for linked in (summary.__cause__, summary.__context__, *(summary.exceptions or ())):
        _cut_library_frames(linked)


def _is_launchers(filename: str) -> bool:
    return filename.startswith((*LAUNCHER_FILES, "<frozen runpy", "<frozen importlib")) or filename == runpy.__file__


def read_record(log_dir: Path, rank: int) -> dict[str, Any] | None:
    """Return a rank's error record, or None where it wrote none."""
    try:
        record: dict[str, Any] = json.loads(record_path(log_dir, rank).read_text())
    except FileNotFoundError:
        return None
    return record


def recorded_ranks(log_dir: Path) -> list[int]:
    """Return the ranks that have an error record."""
    return sorted(int(path.name.split(".")[0].removeprefix("rank-")) for path in log_dir.glob("rank-*.error.json"))


def any_record(log_dir: Path) -> dict[str, Any] | None:
    """Return the record of the lowest rank that has one: ranks that were asked to stop all write the same."""
    ranks = recorded_ranks(log_dir)
    return read_record(log_dir, ranks[0]) if ranks else None
