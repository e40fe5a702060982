"""A rank writes its collectives to the log folder when the launcher asks for them, and when an error ends it.

The launcher asks by a signal that a thread of the rank waits for. The thread writes the stacks of all threads, then the
record that `calls` reads. It answers while the main thread waits in a collective or runs an endless loop. Between two
questions it looks whether an operation over nccl is late (`overdue`).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.diagnosis.stacks import write_stacks
from phalanx.host.files import replace_file
from phalanx.host.processes import began_at
from phalanx.launch.rank_files import ASK, calls_path, process_path

if TYPE_CHECKING:
    from phalanx.diagnosis.overdue import OverdueWatch

_WATCH_SECONDS = 1.0
"""How often a rank looks for late operations."""
_WRITING = threading.Lock()


def answer_launcher(log_dir: Path, slot: int, stack: int) -> None:
    """Answer the launcher from now on; called before any other thread exists, which would take the signal.

    SIGQUIT is for a rank that does not answer because it holds the interpreter lock: only the main thread writes its
    stack, from a handler in C, which can read its own frames at any time, but not those of other threads.
    """
    _write_process(process_path(log_dir, slot))
    faulthandler.register(signal.SIGQUIT, stack, all_threads=False)
    signal.signal(ASK, signal.SIG_IGN)  # a thread that does not block it must not end the rank
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
    threading.Thread(target=_answer, args=(log_dir, slot, stack), name="phalanx-records", daemon=True).start()


def _write_process(path: Path) -> None:
    record = {"pid": os.getpid(), "began": began_at(os.getpid()), "host": socket.gethostname()}
    with suppress(OSError):  # a full disk: the run goes on, and `phalanx stacks` does not find this rank
        path.unlink(missing_ok=True)  # it may be that of an earlier rank, or a link
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump(record, file)


def _answer(log_dir: Path, slot: int, stack: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # all other signals are for the main thread
    status = os.fstat(stack)
    watches, watch = True, None
    while True:
        try:
            if signal.sigtimedwait({ASK}, _WATCH_SECONDS) is None:
                if watches and _has_groups():
                    watch = watch or _overdue_watch(slot)
                    watch.check()
                continue
            if _is_open(stack, status):
                write_stacks(stack)
            write_calls(log_dir, slot)
        except Exception:  # noqa: BLE001 - training goes on without the answer; the log says why there is none
            traceback.print_exc()
            watches = False


def _has_groups() -> bool:
    """Whether this process is in process groups of torch, which it may never load."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    return dist is not None and bool(dist.is_available() and dist.is_initialized())


def _overdue_watch(slot: int) -> OverdueWatch:
    from phalanx.diagnosis.overdue import OverdueWatch  # with torch, which this process has loaded by now

    return OverdueWatch(slot)


def _is_open(descriptor: int, status: os.stat_result) -> bool:
    """Whether a descriptor is still that of a file: a program may have closed it and opened its own file."""
    try:
        return os.path.samestat(os.fstat(descriptor), status)
    except OSError:  # closed
        return False


def write_calls(log_dir: Path, slot: int, *, failed: bool = False) -> None:
    """Write the collectives of this process for the launcher; an answer and an error may come at the same time."""
    with _WRITING:
        message: dict[str, Any] = {"rank": slot, "calls": [], "groups": {}, "failed": failed, "time": time.time()}
        if _has_groups():
            from phalanx.diagnosis.records import read_calls_here  # with torch, as above

            message["rank"] = sys.modules["torch"].distributed.get_rank()
            message["calls"], message["groups"] = read_calls_here()
        replace_file(calls_path(log_dir, slot), json.dumps(message))
