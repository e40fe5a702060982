"""A rank's record of its collectives, in the log folder: written when the launcher asks, and when an error ends it.

The launcher asks by a signal that a thread of the rank waits for. The thread writes the stacks of all threads, then the
record. It answers while the main thread waits in a collective or runs an endless loop. Between two questions it looks
whether an operation over nccl is late (`OverdueWatch`).
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.diagnosis.records import WATCH_SECONDS, OverdueWatch, read_calls_here
from phalanx.diagnosis.stacks import write_stacks
from phalanx.host.files import is_writable_for_others, open_below, replace_file
from phalanx.host.processes import began_at, stat_fields
from phalanx.launch.rank_files import ASK, calls_path, process_path


@dataclass(frozen=True)
class Call:
    """One collective that a rank has entered."""

    group: str
    number: int
    """Its number among the calls in this group."""
    op: str
    detail: str
    """Shape and dtype."""
    where: str
    """The line that called it, such as train.py:88."""
    began: float
    done: bool
    bucket: int = 0
    """Which bucket of gradients it averages, from 1; 0 where that is not known."""
    peer: int | None = None
    """The rank at the other end of a point-to-point message, -1 for any; None for a collective."""

    @property
    def text(self) -> str:
        """Operation, shape and dtype."""
        return f"{self.op} of {self.detail}" if self.detail else self.op


@dataclass(frozen=True)
class RankCalls:
    """What is known of one rank when ranks are compared."""

    rank: int
    calls: tuple[Call, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of each group, by its name."""
    answered: bool = True
    """Whether `calls` are known: a rank that is stopped, was killed, or holds the interpreter lock does not answer."""
    waits: bool = False
    """Whether the stack of a rank that did not answer ends in a collective: on a busy machine it may be late."""
    failed: bool = False
    """Whether an error in a collective ended it: then the last call of each group may be marked as done and is not."""
    aborted: bool = False
    """Whether a library ended it because another size arrived than its collective expected."""
    position: str = ""
    """Where it is or how it ended, as the end of a sentence that begins with its name."""

    def to_message(self, limit: int) -> dict[str, Any]:
        """Return it as a message to another launcher, with at most `limit` of the latest calls in each group."""
        last = {call.group: call.number for call in self.calls}
        recent = [vars(call) for call in self.calls if call.number > last[call.group] - limit]
        return {**vars(self), "calls": recent, "groups": {name: list(ranks) for name, ranks in self.groups.items()}}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RankCalls:
        """Read back what `to_message` or a rank wrote."""
        calls = tuple(Call(**call) for call in message["calls"])
        groups = {name: tuple(ranks) for name, ranks in message["groups"].items()}
        return cls(**{**message, "calls": calls, "groups": groups})


def read_calls(log_dir: Path, slot: int, since: float = 0.0) -> RankCalls | None:
    """Return the record of a rank; None where it has written none since a time in seconds since the epoch."""
    try:
        message = json.loads(calls_path(log_dir, slot).read_text())
    except (FileNotFoundError, ValueError):  # none, or one that a full disk cut
        return None
    return RankCalls.from_message(message) if message.pop("time") >= since else None


def process_of(run_dir: Path, slot: int) -> int | None:
    """Return the process of a rank of this machine that runs, for a signal; None if it is not certain which that is.

    The record in the run's log folder must be that of the user whose process it is: others could name any process.
    """
    try:
        with open_below(run_dir, f"logs/{process_path(run_dir, slot).name}") as file:
            status, record = os.fstat(file.fileno()), json.load(file)
        pid, began, host = int(record["pid"]), int(record["began"]), record["host"]
        owner = os.stat(f"/proc/{pid}").st_uid
    except (OSError, ValueError, KeyError, TypeError):  # none, being written, of another user, or it has ended
        return None
    runs = began_at(pid) == began and stat_fields(pid)[:1] != ["Z"] and host == socket.gethostname()
    return pid if runs and owner == status.st_uid and not is_writable_for_others(status) else None


_WRITING = threading.Lock()


# --- in the rank ----------------------------------------------------------------------------------------------------


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
    watch = OverdueWatch(slot)
    watches = True
    while True:
        try:
            if signal.sigtimedwait({ASK}, WATCH_SECONDS) is None:
                watches = watches and watch.check()
                continue
            if _is_open(stack, status):
                write_stacks(stack)
            write_calls(log_dir, slot)
        except Exception:  # noqa: BLE001 - training goes on without the answer; the log says why there is none
            traceback.print_exc()
            watches = False


def _is_open(descriptor: int, status: os.stat_result) -> bool:
    """Whether a descriptor is still that of a file: a program may have closed it and opened its own file."""
    try:
        return os.path.samestat(os.fstat(descriptor), status)
    except OSError:  # closed
        return False


def write_calls(log_dir: Path, slot: int, *, failed: bool = False) -> None:
    """Write the collectives of this process for the launcher; an answer and an error may come at the same time."""
    with _WRITING:
        dist = getattr(sys.modules.get("torch"), "distributed", None)
        message: dict[str, Any] = {"rank": slot, "calls": [], "groups": {}, "failed": failed, "time": time.time()}
        if dist is not None and dist.is_available() and dist.is_initialized():
            message["rank"] = dist.get_rank()
            message["calls"], message["groups"] = read_calls_here()
        replace_file(calls_path(log_dir, slot), json.dumps(message))
