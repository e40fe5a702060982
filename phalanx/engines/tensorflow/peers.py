"""The other tasks of a TF_CONFIG that somebody else wrote: who of them does not answer is said while TensorFlow waits.

TensorFlow waits for them without a word, holding the interpreter's lock and heeding no SIGTERM. So a small process of
its own looks (`python -m phalanx.engines.tensorflow.peers <pid> <limit>`), and ends the one that waits in vain.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

from phalanx.engines.tensorflow.tf_config import Task, read_task
from phalanx.errors import CommunicationError
from phalanx.host.processes import die_with, own_python
from phalanx.host.reminders import Reminder, duration_text

_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 1.0
_LEAVE_SECONDS = 2.0
_libc = ctypes.CDLL(None)
_libc.signal.argtypes, _libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
_leave = ctypes.cast(_libc._exit, ctypes.c_void_p)


def needed_peers(task: Task) -> dict[str, str]:
    """Return the tasks that this one cannot train without, and where they listen.

    Whoever serves a chief waits for it as long as it takes; an evaluator needs nobody.
    """
    if task.serves or task.role == "evaluator":
        return {}
    return {
        f"{role} {index}" if role != "chief" else role: address
        for role, addresses in task.cluster.items()
        for index, address in enumerate(addresses)
        if role != "evaluator" and (role, index) != (task.role, task.index)
    }


def wait_for_peers(peers: Mapping[str, str], limit: float | None, say: Callable[[str], None]) -> None:
    """Knock at every peer until it has answered once; raise with the names of those that never did."""
    began = time.monotonic()
    reminder = Reminder(began)
    missing = dict(peers)
    while True:
        missing = {name: address for name, address in missing.items() if not answers(address)}
        waited = time.monotonic() - began
        if not missing:
            return
        names = ", ".join(f"{name} ({address})" for name, address in missing.items())
        if limit is not None and waited >= limit:
            tasks = "1 task" if len(missing) == 1 else f"{len(missing)} tasks"
            raise CommunicationError(
                f"{tasks} of TF_CONFIG did not answer within {limit:g} s: {names}",
                hint="Start them, correct their addresses in TF_CONFIG, or wait longer with --start-timeout SECONDS.",
            )
        if reminder.is_due(began + waited):
            words = "" if limit else "; --start-timeout SECONDS limits the wait"
            say(f"no answer yet after {duration_text(waited)} from {names}{words}")
        time.sleep(_LOOK_SECONDS)


def answers(address: str) -> bool:
    """Whether somebody listens at host:port."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return False
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            return True
    except OSError:
        return False


_watcher: subprocess.Popen[bytes] | None = None


def watch_peers(task: Task, limit: float | None) -> None:
    """Watch for the peers of this process, once: the command line asks for it, and the trainer in its script too."""
    global _watcher
    if _watcher is not None or not needed_peers(task):
        return
    takes_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if takes_hangup:  # nohup has it ignored, and a script may have a use for it
        _leave_on_hangup()
    _watcher = subprocess.Popen(
        own_python("from phalanx.engines.tensorflow.peers import main; main()", os.getpid(), limit or ""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    if takes_hangup:
        threading.Thread(target=_give_back_hangup, args=(_watcher,), name="phalanx-peers", daemon=True).start()


def _leave_on_hangup() -> None:
    """Let SIGHUP end this process with exit code 1 even while TensorFlow holds the interpreter's lock.

    The kernel calls libc's `_exit` with the signal's number, which is the code of a run that could not start.
    """
    _libc.signal(int(signal.SIGHUP), _leave)


def _give_back_hangup(watcher: subprocess.Popen[bytes]) -> None:
    """Let SIGHUP mean what it did once nobody watches any more, unless it has got another meaning meanwhile."""
    watcher.wait()
    found = _libc.signal(int(signal.SIGHUP), int(signal.SIG_DFL))
    if found != _leave.value:
        _libc.signal(int(signal.SIGHUP), found)


def _end(process: int) -> None:
    """End the one that waits; SIGHUP may be ignored or the script's own."""
    os.kill(process, signal.SIGHUP)
    time.sleep(_LEAVE_SECONDS)
    os.kill(process, signal.SIGKILL)  # never a stranger: this process dies with its parent


def main() -> None:
    """Look for the peers of the process that started this one."""
    process, limit = int(sys.argv[1]), sys.argv[2]
    die_with(process)
    task = read_task()
    assert task is not None, "whoever started this process has a task"
    try:
        wait_for_peers(needed_peers(task), float(limit) if limit else None, _say)
    except CommunicationError as error:
        _say(str(error))
        _end(process)


def _say(text: str) -> None:
    print(f"phalanx: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
