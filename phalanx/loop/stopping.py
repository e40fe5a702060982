"""When and why a run ends: a stop request that all ranks agree on after a step, `max_time`, early stopping, a tuner."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any

from phalanx.errors import PreemptedError
from phalanx.host.processes import stop_reason
from phalanx.loop import optional
from phalanx.loop.best import MetricWatch
from phalanx.observe.format import duration
from phalanx.observe.guard import say_to_user
from phalanx.world.abort import raise_if_aborted
from phalanx.world.env import read_rank_env, stop_signals
from phalanx.world.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

    from phalanx.loop.formation import Formation
    from phalanx.loop.preemption import StopNotices
    from phalanx.loop.tuning_trial import EpochControl

_READ_EVERY_SECONDS = 0.25
_MEASURED_STEPS = 8
_REGROUP, _END = "regroup", "end"
BY_CTRL_C = "stopped by Ctrl-C"


class StopRequest:
    """Receives the signals that stop a run; every rank gets the same answer at the same step."""

    def __init__(self, world: World, ranks_synced: Callable[[int], bool] | None = None) -> None:
        """`ranks_synced`: where ranks are not in lock-step, whether they have waited for each other in a step."""
        self._world = world
        self._store = world.store if world.world_size > 1 else None
        self._key = f"stop_request/{world.env.attempt}"
        self._is_alone = read_rank_env() is None
        """Whether this is a script or a notebook that trains by itself: no launcher gets its Ctrl-C."""
        self._signal: str | None = None
        self._request: tuple[str, bool] | None = None
        self._sent = False
        self._previous: dict[signal.Signals, Any] = {}
        self._ranks_synced = ranks_synced
        self._period: int | None = None
        self._read_at: list[float] = []
        """When the requests were read after the first steps."""
        self.reason: str | None = None
        self.regroups = False
        """Whether all ranks stop in order to go on with other ranks; agreed, as `reason` is."""
        self._notices: StopNotices | None = None

    def listen(self, notices: StopNotices | None = None) -> None:
        """Install the handlers, and watch for notices that the run has to end soon.

        Outside the main thread Python allows no handlers, and only `request_stop` and notices stop the run.
        """
        self._notices = notices
        if notices is not None:
            notices.watch()
        if threading.current_thread() is threading.main_thread():
            numbers = stop_signals(self._world.env)
            if self._is_alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                numbers = (*numbers, signal.SIGINT)
            for number in numbers:
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
        return self.from_outside is not None or self._request is not None

    @property
    def from_outside(self) -> str | None:
        """The request to stop from outside the process, such as SIGTERM; None where there is none, or only `ask`."""
        self._signal = self._signal or stop_reason()
        return self._signal

    def ask(self, reason: str, *, regroup: bool = False) -> None:
        """Request that all ranks stop at a step boundary, as a signal does; from any thread.

        `regroup`: to go on with other ranks. The store has it too, for ranks that were not asked themselves yet.
        """
        self._request = self._request or (reason, regroup)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and self._is_alone:
            if self._signal == name:
                raise KeyboardInterrupt("stopped at once by a second Ctrl-C: the last step may not be complete")
            say_to_user("SIGINT: stopping after this step (Ctrl-C again to stop at once)")
        self._signal = name

    def agreed(self, step: int) -> bool:
        """Whether all ranks stop after this step; every rank calls this after every step."""
        raise_if_aborted()
        outside = self.from_outside
        request = self._request if outside is None else (outside, False)
        if self._store is None:
            self.reason, self.regroups = request or (None, False)
            return request is not None
        if request is not None and not self._sent:
            self._sent = True
            reason, regroup = request
            self._store.compare_set(self._key, "", f"{step}:{_REGROUP if regroup else _END}:{reason}")
        if self._ranks_synced is not None:
            return self._ranks_synced(step) and self._read(self._store, step)
        if self._period is None:
            self._measure(self._store)
        elif step % self._period:
            return False
        return self._read(self._store, step)

    def _measure(self, store: dist.Store) -> None:
        """Time the first steps, then agree on how often to read the store: the very first take longer than most."""
        self._read_at.append(time.monotonic())
        if len(self._read_at) == _MEASURED_STEPS:
            seconds = median(after - before for before, after in pairwise(self._read_at))
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


@dataclass
class RunEnding:
    """Why and how a run ends."""

    early: bool = False
    """Whether it ends before its last step."""
    status: str = "finished"
    reason: str = ""
    reported: bool = False
    """Whether the end was reported: only the result is left to return."""


class RunControl:
    """Decides when a run ends; every rank comes to the same decision at the same step."""

    def __init__(self, formation: Formation, ranks_synced: Callable[[int], bool] | None) -> None:
        """`ranks_synced`: where ranks are not in lock-step, whether they have waited for each other in a step."""
        config, world = formation.config, formation.world
        self._formation = formation
        self.stop = StopRequest(world, ranks_synced)
        self.ending = RunEnding()
        if tried := int(config.fast_dev_run):
            number = f"at most {tried} batch{'es' * (tried > 1)}"
            self.ending.reason = f"fast_dev_run, {number} of training and of evaluation per rank; nothing is kept"
        self.before_stop: Callable[[], None] | None = None
        """Called when all ranks have agreed to stop, before saving; it may raise instead."""
        self._trial = self._trial_control()
        self._time_limit = TimeLimit(config.max_seconds)
        self._time_before = 0.0
        watched = config.stopping_metric
        self._early = watched and MetricWatch("early_stopping", watched, min_delta=config.min_delta)

    def _trial_control(self) -> EpochControl | None:
        if "PHALANX_TRIAL_CONTROL" not in os.environ:
            return None
        world = self._formation.world
        return optional.EpochControl(world.store, asks=world.is_main, given_up=lambda: self.stop.requested)

    def begin(self, say: Callable[[str, str], None]) -> None:
        """Start the clock of `max_time`, and receive signals and notices; `say`: shows the user a message."""
        self._time_limit.begin(self._time_before)
        self.stop.listen(self._notices(say))

    def _notices(self, say: Callable[[str, str], None]) -> StopNotices | None:
        config = self._formation.config
        if config.preemption_file is None and "SLURM_JOB_ID" not in os.environ:
            return None
        return optional.StopNotices(config, self._formation.world, self.stop.ask, say)

    def end_early(self, reason: str, status: str = "finished") -> None:
        """End training after this step; the first reason counts."""
        self.ending.early, self.ending.reason = True, self.ending.reason or reason
        if status != "finished":
            self.ending.status = status

    def judge(self, values: Mapping[str, float], step: int) -> None:
        """End training where the watched metric no longer improves."""
        watch, patience = self._early, self._formation.config.patience
        if watch is not None and watch.judge(values, step) is False and watch.since >= patience:
            unit = "epoch" if watch.watched.name.startswith("train/") else "evaluation"
            times, value = f"{watch.since} {unit}{'s' * (watch.since > 1)}", values[watch.watched.name]
            why = f"has not improved for {times}" if math.isfinite(value) else f"is {value}"
            self.end_early(f"early stopping, {watch.watched.name} {why}")

    def must_stop(self, step: int) -> bool:
        """Whether all ranks stop after this step, to be resumed later; `max_time` ends training instead."""
        if self._formation.is_main and self._time_limit.is_over:
            self.stop.ask(self._time_limit.reason)
        if not self.stop.agreed(step):
            return False
        if self.stop.reason == self._time_limit.reason:
            self.end_early(self._time_limit.reason)
            return False
        if self.before_stop is not None:
            self.before_stop()
        return True

    def after_epoch(self, epochs: int) -> None:
        """Ask the tuner, if any, whether to continue after this many epochs."""
        if self._trial is None:
            return
        with self._formation.clock.paused("idle"):
            goes_on = self._trial.should_continue(epochs)
        if not goes_on:
            self.end_early("stopped by the tuner", "stopped")

    def stopped(self) -> tuple[str, str]:
        """Return the status and the reason of a run that a request has stopped."""
        if self.stop.reason == "SIGINT":
            return "interrupted", BY_CTRL_C
        return "preempted", f"stopped by {self.stop.reason}"

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive: the time spent, the ending, and the state of early stopping."""
        early = None if self._early is None else self._early.state_dict()
        decided = None if self._trial is None else self._trial.decided
        ending = dataclasses.asdict(self.ending)
        return {"time_spent": self._time_limit.spent, "ending": ending, "stopping": early, "decided": decided}

    def load_state_dict(self, state: dict[str, Any], epochs: int, *, same_run: bool) -> None:
        """Continue after `epochs`; `same_run`: with other ranks, so that the time counts on."""
        if same_run:
            self._time_before = state["time_spent"]
            self.ending = RunEnding(**state["ending"])
        if self._early is not None:
            self._early.load_state_dict(state["stopping"])
        if self._trial is not None:
            self._trial.start_after(state["decided"] if same_run and state.get("decided") is not None else epochs)


class TimeLimit:
    """The time after which training ends (`max_time`); the main rank watches it, and asks all ranks to stop."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._began, self._ends = 0.0, math.inf
        self.reason = "" if seconds is None else f"max_time of {duration(seconds)} reached"

    def begin(self, spent: float = 0.0) -> None:
        """Start the clock; `spent`: seconds that count already."""
        self._began = time.monotonic() - spent
        if self._seconds is not None:
            self._ends = self._began + self._seconds

    @property
    def spent(self) -> float:
        """The seconds that count so far."""
        return time.monotonic() - self._began if self._began else 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._ends


def preempted_error(reason: str, step: int, checkpoint: str | None) -> PreemptedError:
    """Return the error of a run that was stopped, with the checkpoint to resume from."""
    outcome = f"checkpoint {checkpoint}" if checkpoint else "no checkpoint was saved, because no checkpoint_dir was set"
    hint = "Set checkpoint_dir to keep the progress of a run that is stopped."
    if checkpoint:
        hint = f"To resume, add resume_from_checkpoint={checkpoint!r} (--resume-from-checkpoint {checkpoint})."
    return PreemptedError(f"{reason} after step {step}: {outcome}", hint=hint)
