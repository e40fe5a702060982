"""How a rank ended: its exit code, its traceback without the launcher's frames, and a record for the launcher."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import runpy
import socket
import sys
import time
import traceback
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.host.files import replace_file
from phalanx.host.lost_peers import is_of_collectives
from phalanx.host.messages import Message
from phalanx.host.processes import is_ending
from phalanx.observe import heartbeat
from phalanx.observe.call_ring import is_users

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LAUNCHER_FILE = re.compile(
    rf"{re.escape(_PACKAGE)}((launch|diagnosis)/|engines/\w+/(rank|worker)\.py$)|<frozen (runpy|importlib)"
)
"""Files whose frames lie around every target: the launcher's, and the `rank.py` or `worker.py` of an engine that starts
ranks itself."""


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
    while frames is not None and is_launchers(frames.tb_frame.f_code.co_filename):
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
            lambda frame: (
                frame.filename.startswith(_PACKAGE)
                or is_launchers(frame.filename)
                or frame.filename.endswith("torch/utils/_contextlib.py")  # a decorator of a function of ours
            ),
            summary.stack,
        )
    )
    if kept:
        summary.stack[:] = kept
    for linked in (summary.__cause__, summary.__context__, *(summary.exceptions or ())):
        _cut_library_frames(linked)


def is_launchers(filename: str) -> bool:
    """Whether a frame of this file belongs to the way targets are run: reports leave it out."""
    return filename == runpy.__file__ or _LAUNCHER_FILE.match(filename) is not None


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


# --- the DataLoader that a killed worker process belonged to ----------------------------------------------------------
# torch names only the worker's process id, and raises the error wherever the main thread is at that moment, often far
# from the loader. It may also come after an error about a connection to the worker, which breaks before the process has
# ended.

_KILLED = re.compile(r"DataLoader worker \(pid\S* (\d+)")
_POLLS, _POLL_SECONDS = 10, 0.05
"""How often to look for a killed worker, and how long between."""
_ENDING_SECONDS = 20.0
"""How much longer to wait for one that the kernel is taking down: on a busy machine that takes seconds."""
_loaders: dict[int, str] = {}
"""The data set and the loop of each worker process."""


def note_loaders() -> None:
    """Remember from now on which data set each worker process loads, and the user's line that began the loop."""
    from phalanx.torch_compat import LoaderIterator

    original = LoaderIterator.__init__

    @functools.wraps(original)
    def begin(self: Any, loader: Any) -> None:
        original(self, loader)
        places = traceback.walk_stack(sys._getframe())
        users = (_place(frame.f_code, line) for frame, line in places if is_users(frame.f_code.co_filename))
        loop = f", iterated at {found}" if (found := next(users, "")) else ""
        _loaders.update(dict.fromkeys((worker.pid for worker in self._workers), f"{_reader(loader.dataset)}{loop}"))

    LoaderIterator.__init__ = begin  # type: ignore[method-assign]


def name_loader(error: BaseException) -> BaseException:
    """Return the error of a killed worker with its loader, also where another error came first, else the same error."""
    polls = _POLLS if _loaders else 0
    latest = time.monotonic() + _ENDING_SECONDS
    while polls > 0:
        if isinstance(error, RuntimeError) and (worker := _KILLED.match(str(error))) is not None:
            place = _loaders.get(int(worker[1]), "an unknown data set")
            error.args = (f"{str(error).rstrip(' .')}. It loads {place}.",)
            return error
        if (killed := _killed_worker()) is not None:
            killed.add_note(f"It was first seen as {type(error).__name__}: {error}")
            killed.__context__ = None
            error = killed.with_traceback(error.__traceback__)
        elif not isinstance(error, (OSError, EOFError)):
            return error
        else:
            polls -= time.monotonic() > latest or not any(map(is_ending, _loaders))
            time.sleep(_POLL_SECONDS)
    return error


def _killed_worker() -> RuntimeError | None:
    """Return, once, the error of a worker that was killed or failed."""
    from phalanx.torch_compat import raise_for_killed_worker

    try:
        raise_for_killed_worker()
    except RuntimeError as error:  # also where the handler of SIGCHLD raises it at this moment
        return error
    return None


def _reader(dataset: Any) -> str:
    """Return the name and line of the method that loads a sample: the user's, also inside of other data sets."""
    kind = type(dataset)
    methods = [getattr(getattr(kind, name, None), "__code__", None) for name in ("__getitem__", "__iter__")]
    codes = [code for code in methods if code is not None]
    users = next((code for code in codes if is_users(code.co_filename)), None)
    if users is None and hasattr(dataset, "dataset"):
        return _reader(dataset.dataset)
    code = users or next(iter(codes), None)
    return f"{kind.__qualname__}.{code.co_name} ({_place(code, code.co_firstlineno)})" if code else kind.__qualname__


def _place(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line}"
