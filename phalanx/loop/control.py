"""When and why a run ends: a stop request, `max_time`, early stopping, the tuner, a callback."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.errors import PreemptedError
from phalanx.loop.best import MetricWatch
from phalanx.loop.stopping import EpochControl, StopRequest
from phalanx.observe.format import duration

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation
    from phalanx.loop.stopping import StopNotices


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
        self.before_stop: Callable[[], None] | None = None
        """Called when all ranks have agreed to stop, before saving; it may raise instead."""
        self._trial = EpochControl(world.store, asks=world.is_main, given_up=lambda: self.stop.requested)
        self._time_limit = TimeLimit(config.max_seconds)
        self._time_before = 0.0
        watched = config.stopping_metric
        self._early = watched and MetricWatch("early_stopping", watched, min_delta=config.options.min_delta)

    def begin(self, say: Callable[[str, str], None]) -> None:
        """Start the clock of `max_time`, and receive signals and notices; `say`: shows the user a message."""
        self._time_limit.begin(self._time_before)
        self.stop.listen(self._notices(say))

    def _notices(self, say: Callable[[str, str], None]) -> StopNotices | None:
        config = self._formation.config
        if config.preemption_file is None and "SLURM_JOB_ID" not in os.environ:
            return None
        from phalanx.loop.stopping import StopNotices

        return StopNotices(config, self._formation.world, self.stop.ask, say)

    def end_early(self, reason: str, status: str = "finished") -> None:
        """End training after this step; the first reason counts."""
        self.ending.early, self.ending.reason = True, self.ending.reason or reason
        if status != "finished":
            self.ending.status = status

    def judge(self, values: dict[str, float], step: int) -> None:
        """End training where the watched metric no longer improves."""
        watch, patience = self._early, self._formation.config.patience
        if watch is not None and watch.judge(values, step) is False and watch.since >= patience:
            unit = "epoch" if watch.watched.name.startswith("train/") else "evaluation"
            times = f"{watch.since} {unit}{'s' * (watch.since > 1)}"
            self.end_early(f"early stopping, {watch.watched.name} has not improved for {times}")

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
        if not self._trial.is_active:
            return
        with self._formation.clock.paused("idle"):
            goes_on = self._trial.should_continue(epochs)
        if not goes_on:
            self.end_early("stopped by the tuner", "stopped")

    def stopped(self) -> tuple[str, str]:
        """Return the status and the reason of a run that a request has stopped."""
        if self.stop.reason == "SIGINT":
            return "interrupted", "stopped by Ctrl-C"
        return "preempted", f"stopped by {self.stop.reason}"

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive: the time spent, the ending, and the state of early stopping."""
        early = None if self._early is None else self._early.state_dict()
        return {"time_spent": self._time_limit.spent, "ending": dataclasses.asdict(self.ending), "stopping": early}

    def load_state_dict(self, state: dict[str, Any], epochs: int, *, same_run: bool) -> None:
        """Continue after `epochs`; `same_run`: with other ranks, so that the time counts on."""
        if same_run:
            self._time_before = state["time_spent"]
            self.ending = RunEnding(**state["ending"])
        if self._early is not None:
            self._early.load_state_dict(state["stopping"])
        self._trial.start_after(epochs)


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


def preempted_error(reason: str | None, step: int, checkpoint: str | None) -> PreemptedError:
    """Return the error of a run that was stopped, with the checkpoint to resume from."""
    kept = f"checkpoint {checkpoint}" if checkpoint else "no checkpoint_dir was set, so nothing was kept"
    hint = "Set checkpoint_dir to keep the progress of a run that is stopped."
    if checkpoint:
        hint = f"To resume, add resume_from_checkpoint={checkpoint!r} (--resume-from-checkpoint {checkpoint})."
    return PreemptedError(f"stopped by {reason} after step {step}: {kept}", hint=hint)
