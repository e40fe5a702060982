"""Watches the other tasks of a TF_CONFIG that another program wrote, and reports those that do not answer.

TensorFlow waits for them without a message, holding the interpreter's lock and ignoring SIGTERM. So a separate process
(`python -m phalanx.engines.tensorflow.peers <pid> <limit>`) looks for them, and ends the waiting one after the limit.
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
from phalanx.launch.launcher_loop import Reminder, duration_text

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 1.0
_EXIT_SECONDS = 2.0
_libc = ctypes.CDLL(None)
_libc.signal.argtypes, _libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
_exit = ctypes.cast(_libc._exit, ctypes.c_void_p)


def needed_peers(task: Task) -> dict[str, str]:
    """Return the tasks that this one cannot train without, and their addresses.

    A task that serves a chief waits for it without a limit; an evaluator needs no other task.
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
    """Connect to every peer until it has answered once; raise with the names of those that never did."""
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
            hint = "" if limit else "; --start-timeout SECONDS limits the wait"
            say(f"no answer yet after {duration_text(waited)} from {names}{hint}")
        time.sleep(_POLL_SECONDS)


def answers(address: str) -> bool:
    """Whether a process listens at host:port."""
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
    """Watch for the peers of this process, once: both the command line and the trainer call this."""
    global _watcher
    if _watcher is not None or not needed_peers(task):
        return
    default_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if default_hangup:  # not with nohup, which ignores it, or where a script handles it
        # SIGHUP must end this process with exit code 1, the code of a run that could not start, even while
        # TensorFlow holds the interpreter's lock: so libc's `_exit` is the handler, called with the number 1.
        _libc.signal(int(signal.SIGHUP), _exit)
    _watcher = subprocess.Popen(
        own_python("from phalanx.engines.tensorflow.peers import main; main()", os.getpid(), limit or ""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    if default_hangup:
        threading.Thread(target=_restore_hangup, args=(_watcher,), name="phalanx-peers", daemon=True).start()


def _restore_hangup(watcher: subprocess.Popen[bytes]) -> None:
    """Restore SIGHUP's default when the watcher has ended, unless it has another handler meanwhile."""
    watcher.wait()
    found = _libc.signal(int(signal.SIGHUP), int(signal.SIG_DFL))
    if found != _exit.value:
        _libc.signal(int(signal.SIGHUP), found)


def main() -> None:
    """Look for the peers of the process that started this one."""
    process, limit = int(sys.argv[1]), sys.argv[2]
    die_with(process)
    task = read_task()
    assert task is not None, "the process that started this one has a task"
    try:
        wait_for_peers(needed_peers(task), float(limit) if limit else None, _say)
    except CommunicationError as error:
        _say(str(error))
        os.kill(process, signal.SIGHUP)  # which may be ignored, or handled by the script
        time.sleep(_EXIT_SECONDS)
        os.kill(process, signal.SIGKILL)  # never another process of this number: this one dies with its parent


def _say(text: str) -> None:
    print(f"phalanx: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
