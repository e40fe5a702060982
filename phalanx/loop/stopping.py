"""Stop requests (signals, notices, tuning trials), agreed by all ranks at a step boundary.

Notices say that a run has to end soon: a Slurm time limit, or a file that an agent of the cloud provider creates. A
thread watches for them and asks all ranks to stop, as SIGTERM does: a checkpoint at the next step, exit code 75.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from phalanx.config import DistributedConfig
from phalanx.observe import control
from phalanx.observe.control import TrialControl
from phalanx.observe.format import duration
from phalanx.observe.goodput import LAUNCHED_AT
from phalanx.world.abort import raise_if_aborted
from phalanx.world.env import read_rank_env, stop_signals
from phalanx.world.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

    from phalanx.world.world import World

_READ_EVERY_SECONDS = 0.25
_MEASURED_STEPS = 8
_REGROUP, _END = "regroup", "end"


class StopRequest:
    """Receives the signals that stop a run; every rank gets the same answer at the same step."""

    def __init__(self, world: World, ranks_synced: Callable[[int], bool] | None = None) -> None:
        """`ranks_synced`: where ranks are not in lock-step, whether they have waited for each other in a step."""
        self._world = world
        self._store = world.store if world.world_size > 1 else None
        self._key = f"stop_request/{world.env.attempt}"
        self._signal: str | None = None
        self._asked: tuple[str, bool] | None = None
        self._sent = False
        self._previous: dict[signal.Signals, Any] = {}
        self._ranks_synced = ranks_synced
        self._period: int | None = None
        self._started = 0.0
        self._seen = 0
        self.reason: str | None = None
        self.regroups = False
        """Whether all ranks stop in order to go on with other ranks; agreed, as `reason` is."""
        self._notices: StopNotices | None = None

    def listen(self, notices: StopNotices | None = None) -> None:
        """Install the handlers, and watch for notices that the run has to end soon.

        Outside the main thread Python allows no handlers, and only `control` and notices stop the run.
        """
        self._notices = notices
        if notices is not None:
            notices.watch()
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals(self._world.env):
                self._previous[number] = signal.signal(number, self._handle)

    def silence(self) -> None:
        """Restore the previous handlers, and watch no longer."""
        if self._notices is not None:
            self._notices.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @property
    def requested(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self.from_outside is not None or self._asked is not None

    @property
    def from_outside(self) -> str | None:
        """The request to stop from outside the process, such as SIGTERM; None where there is none, or only `ask`."""
        self._signal = self._signal or control.stop_reason()
        return self._signal

    def ask(self, reason: str, *, regroup: bool = False) -> None:
        """Request that all ranks stop at a step boundary, as a signal does; from any thread.

        `regroup`: to go on with other ranks. The store has it too, for ranks that were not asked themselves yet.
        """
        self._asked = self._asked or (reason, regroup)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name

    def agreed(self, step: int) -> bool:
        """Whether all ranks stop after this step; every rank calls this after every step."""
        raise_if_aborted()
        outside = self.from_outside
        wanted = self._asked if outside is None else (outside, False)
        if self._store is None:
            self.reason, self.regroups = wanted or (None, False)
            return wanted is not None
        if wanted is not None and not self._sent:
            self._sent = True
            reason, regroup = wanted
            self._store.compare_set(self._key, "", f"{step}:{_REGROUP if regroup else _END}:{reason}")
        if self._ranks_synced is not None:
            return self._ranks_synced(step) and self._read(self._store, step)
        if self._period is None:
            self._measure(self._store)
        elif step % self._period:
            return False
        return self._read(self._store, step)

    def _measure(self, store: dist.Store) -> None:
        """Time the first steps, then agree on how often to read the store."""
        if self._seen == 0:
            self._started = time.monotonic()
        self._seen += 1
        if self._seen == _MEASURED_STEPS:
            seconds = (time.monotonic() - self._started) / (_MEASURED_STEPS - 1)
            key = f"{self._key}/period"
            if self._world.is_main:
                store.set(key, str(max(1, min(1000, int(_READ_EVERY_SECONDS / max(seconds, 1e-6))))))
            self._period = int(store.get(key))

    def _read(self, store: dist.Store, step: int) -> bool:
        if not store.check([self._key]):
            return False
        requested_after, kind, self.reason = store.get(self._key).decode().split(":", 2)
        self.regroups = kind == _REGROUP
        return step > int(requested_after)


_POLL_SECONDS = 0.02


class EpochControl:
    """Decides after epochs whether a tuning trial continues."""

    def __init__(self, store: dist.Store | None, *, asks: bool, given_up: Callable[[], bool] = lambda: False) -> None:
        """`store`: shares the answer of the rank that `asks` (None: one rank); `given_up`: the run ends anyway."""
        self._control = TrialControl.from_environment()
        self._store = store
        self._asks = asks
        self._given_up = given_up

    @property
    def is_active(self) -> bool:
        """Whether this run is a trial that may be stopped."""
        return self._control is not None

    def start_after(self, epochs: int) -> None:
        """Note the epochs that a resumed run has completed."""
        if self._control is not None:
            self._control.start_after(epochs)

    def should_continue(self, epochs: int) -> bool:
        """Whether training continues after this many epochs; every rank calls this, and gets the same answer."""
        if self._control is None or not self._control.is_due(epochs):
            return True
        if self._store is None:
            return self._control.wait(epochs, given_up=self._given_up)

        env = read_rank_env()
        key = f"trial_control/{env.attempt if env is not None else 0}/{epochs}"
        if self._asks:
            goes_on = self._control.wait(epochs, given_up=self._given_up)
            self._store.set(key, "on" if goes_on else "stop")
            return goes_on
        # Not store.get, which has a timeout: the answer may take hours, until other trials have come this far.
        while not self._store.check([key]):
            time.sleep(_POLL_SECONDS)
        return bool(self._store.get(key) == b"on")


_NOTICE_SECONDS = 1.0
_ASK_SECONDS = 10.0
_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


class StopNotices:
    """Watches for notices in a thread: the file on every machine, the time limit for the whole job on the main rank."""

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
        self._margin = config.options.preemption_margin
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
            left = max(0.0, ends - time.time())
            margin = margin if margin < left else left / 2  # a job of a minute trains, too
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
    if (given := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
        return float(given)
    command = ["squeue", "--noheader", f"--jobs={environ['SLURM_JOB_ID']}", "--format=%L"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no squeue in this container, or a controller that is down
        return None
    left = _LEFT.fullmatch(asked.stdout.strip())
    if left is None:  # UNLIMITED, NOT_SET, or an error
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in left.groups())
    return time.time() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
