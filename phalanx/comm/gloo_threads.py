"""The scheduling of gloo's network threads.

gloo's thread looks at its sockets and tries the lock of the connection. When another thread holds the lock it looks
again at once, for as long as it is given the core. If it was woken on the core of the very thread that holds the lock,
that thread can go on only after a tick of the scheduler: every message then takes 4 ms (with 250 ticks per second)
instead of 0.1 ms. A thread of the policy SCHED_BATCH does not take the core from a running thread when it is woken, so
the holder finishes first. An idle core still takes the woken thread at once.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_THREAD_NAME = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")


def let_compute_go_first() -> None:
    """Put gloo's network threads of this process behind threads that compute, where threads have names."""
    if not _TASKS.is_dir():
        return
    for task in _TASKS.iterdir():
        # A thread may just have ended, and a sandbox may refuse the call: then messages are only slower.
        with contextlib.suppress(OSError):
            if _name_of(task) == _THREAD_NAME and os.sched_getscheduler(int(task.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _name_of(task: Path) -> str:
    return (task / "comm").read_text().strip()
