"""A process with torch loaded that forks the ranks: a rank starts in milliseconds instead of seconds.

It is started once, takes requests over a socket, and ends with its parent: nothing that a learner's file starts stays
behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_COURSE = Path(__file__).resolve().parents[1]
_PR_SET_CHILD_SUBREAPER = 36


class ZygoteLost(RuntimeError):
    """The process that starts ranks is not there any more."""


class Zygote:
    """The parent's end: start ranks, ask which have ended, end the rest."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(_COURSE), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "FATAL"}
        if sys.platform == "linux":
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        code = f"from grader.zygote import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],  # -P: a queue.py of the learner does not replace Python's
            pass_fds=(theirs.fileno(),),
            env=variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the parent, which ends this
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        try:
            self._connection.recv()  # torch is loaded: the clocks of the runs begin after that
        except EOFError:
            raise ZygoteLost("the process that starts ranks could not load torch: see above") from None

    def start(self, specs: list[dict[str, Any]]) -> list[int]:
        """Start one process per specification and return their process ids."""
        return self._ask("start", specs)  # type: ignore[no-any-return]

    def ended(self) -> dict[int, int]:
        """Return the exit codes of all processes that have ended, by process id; minus the signal that ended one."""
        return self._ask("ended", None)  # type: ignore[no-any-return]

    def end_all(self) -> None:
        """End the processes, and what they have started."""
        self._ask("end", None)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, verb: str, what: Any) -> Any:
        try:
            self._connection.send((verb, what))
            return self._connection.recv()
        except (EOFError, OSError):
            raise ZygoteLost("the process that starts ranks has ended: does your code end its parent?") from None


def serve(descriptor: int) -> None:
    """Answer requests until the parent's end is closed."""
    connection = Connection(descriptor)
    if sys.platform == "linux":  # processes whose parent ends become children of this one, also those of new sessions
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _load()
    from grader.rank import run_rank

    try:
        connection.send("ready")
    except OSError:  # the parent was interrupted meanwhile
        return
    running: set[int] = set()
    codes: dict[int, int] = {}
    while True:
        try:
            verb, what = connection.recv()
        except (EOFError, ConnectionResetError):
            _end(running, codes)
            return
        if verb == "start":
            codes.clear()
            pids = []
            for spec in what:
                pid = os.fork()
                if not pid:
                    os.setpgid(0, 0)  # what the rank starts ends with it
                    os.close(descriptor)
                    run_rank(spec)
                pids.append(pid)
            running.update(pids)
            connection.send(pids)
        elif verb == "ended":
            _reap(running, codes)
            connection.send(dict(codes))
        else:
            _end(running, codes)
            connection.send(None)


def _load() -> None:
    import torch
    import torch._dynamo  # the first step of an optimizer imports it, seconds in every rank
    import torch.distributed
    import torch.nn.parallel

    torch.set_num_threads(1)


def _reap(running: set[int], codes: dict[int, int]) -> None:
    for pid in tuple(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            codes[pid] = os.waitstatus_to_exitcode(status)
            running.discard(pid)


def _end(running: set[int], codes: dict[int, int]) -> None:
    for pid in running | set(codes):
        with suppress(ProcessLookupError, PermissionError):  # the group may have ended, or not begun
            os.killpg(pid, signal.SIGKILL)
        if pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for pid in tuple(running):
        os.waitpid(pid, 0)
        running.discard(pid)
    _end_orphans()
    codes.clear()  # their numbers may belong to other processes from now on


def _end_orphans() -> None:
    """End what ranks have started in their own sessions; the children of an orphan are the next orphans."""
    while orphans := _children():
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    """Return the children of this process; none where the system has no /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            if int(file.read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                found.append(int(file.parent.name))
    return found
