"""Notices that a run has to end soon: a Slurm time limit, or a file that an agent of the cloud provider creates.

A thread watches for them and asks all ranks to stop, as SIGTERM does: a checkpoint at the next step, exit code 75.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.config import DistributedConfig
from phalanx.observe.format import duration
from phalanx.observe.goodput import LAUNCHED_AT
from phalanx.world.world import World

if TYPE_CHECKING:
    pass

_NOTICE_SECONDS = 1.0
_ASK_SECONDS = 10.0
_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


class StopNotices:
    """Watches for notices in a thread: the file on every node, the time limit for the whole job on the main rank."""

    def __init__(
        self,
        config: DistributedConfig,
        world: World,
        ask: Callable[[str], None],
        say: Callable[[str, str], None],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`ask`: requests that all ranks stop, with the reason; `say`: shows the user a message of a level."""
        self._ask, self._say = ask, say
        self._environ = os.environ if environ is None else environ
        watches_file = config.preemption_file is not None and world.env.local_rank == 0
        self._file = Path(config.preemption_file) if watches_file and config.preemption_file else None
        self._margin = config.preemption_margin
        self._watches_limit = world.is_main and self._margin > 0 and "SLURM_JOB_ID" in self._environ
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Start the thread, where there is something to watch."""
        before, launched = _changed(self._file), float(self._environ.get(LAUNCHED_AT) or time.time())
        if before is not None and before > launched * 1e9:  # it came while ranks were started or replaced
            before = None
        if before is not None:
            old = f"preemption_file {self._file} existed before this run: it counts once it is written again"
            self._say(old, "warning")
        if self._file is not None or self._watches_limit:
            self._thread = threading.Thread(target=self._run, args=(before,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_NOTICE_SECONDS)

    def _run(self, before: int | None) -> None:
        stop_at, margin = None, self._margin
        if self._watches_limit and (ends := job_end(self._environ)) is not None:
            seconds_left = max(0.0, ends - time.time())
            margin = margin if margin < seconds_left else seconds_left / 2  # a job of a minute trains, too
            stop_at = ends - margin
        while not self._ended.wait(_NOTICE_SECONDS):
            if stop_at is not None and time.time() >= stop_at:
                self._ask(f"the time limit of the Slurm job, {duration(margin)} before its end")
                return
            if self._file is not None and _changed(self._file) not in (None, before):
                self._ask(f"the preemption notice {self._file}")
                return


def _changed(path: Path | None) -> int | None:
    """Return when a file was last changed; None where there is none."""
    try:
        return None if path is None else path.stat().st_mtime_ns
    except OSError:  # not there, or a mount that does not answer now
        return None


def job_end(environ: Mapping[str, str]) -> float | None:
    """Return when the Slurm job of this process ends, in seconds since the epoch; None without a limit."""
    if (end_time := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
        return float(end_time)
    command = ["squeue", "--noheader", f"--jobs={environ['SLURM_JOB_ID']}", "--format=%L"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no squeue in this container, or a controller that is down
        return None
    remaining = _LEFT.fullmatch(answer.stdout.strip())
    if remaining is None:  # UNLIMITED, NOT_SET, or an error
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in remaining.groups())
    return time.time() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
