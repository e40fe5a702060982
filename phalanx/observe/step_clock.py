"""`StepClock`: the one clock of training steps. Goodput, gauges, checks of slow ranks and throughput read it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""What a rank does in a step. `backward` holds the reduction of gradients; `other` is logging, evaluation, saving."""


class Reading(NamedTuple):
    """What a clock has counted since it was started. The pauses are not in it."""

    seconds: float
    samples: int
    steps: int
    data_wait: float
    communication: float
    own_work: float
    """Seconds of work that waits for no other rank: data and forward passes, where replicas hold whole models."""


class SlowLaps(NamedTuple):
    """How long the slow laps took, how many there were, and of how many."""

    seconds: float
    slow: int
    laps: int


class StepClock:
    """Counts steps, their samples, and seconds by phase; what happens in `paused()` is counted apart, by its name.

    A phase lasts until the next one is entered, so the phases add up to the wall time, apart from `leave_out`. On CUDA
    they are times of the host, which launches work and does not wait for it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.data_wait: Callable[[], float] = lambda: 0.0
        """Seconds that this rank has waited for training data so far."""
        self.communication: Callable[[], float | None] = lambda: None
        """Seconds that it has waited for other ranks; None where the strategy does not count them."""
        self.phase = "other"
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self._entered = clock()
        self.on_enter: Callable[[str], object] | None = None
        """Called with the name of each phase that begins: a profiler marks its ranges by this."""
        self.start()

    def start(self) -> None:
        """Begin a run: steps, samples, pauses and rates count from here."""
        self.samples = self.steps = 0
        self.pauses: dict[str, float] = {}
        """Seconds paused so far, by name."""
        self._started = self._clock()
        self._last_step = 0.0
        self._excluded = (0.0, 0.0, 0.0)
        self._paused_at: tuple[float, float, float] | None = None
        self.warm_up = Reading(0.0, 0, 0, 0.0, 0.0, 0.0)
        """What the average rate leaves out beside the pauses: what is done on first use."""
        self._mark = (0.0, 0, 0)
        self._laps: list[tuple[float, int]] = []

    @property
    def now(self) -> float:
        """The time, from an arbitrary zero; it does not jump when the time of day is set."""
        return self._clock()

    @property
    def seconds(self) -> float:
        """The training time so far."""
        return (self._clock() if self._paused_at is None else self._paused_at[0]) - self._started - self._excluded[0]

    @property
    def paused_seconds(self) -> float:
        """The time of all pauses so far."""
        return self._excluded[0]

    def enter(self, name: str) -> None:
        """End the current phase and begin another; called several times per step, so it must stay cheap."""
        now = self._clock()
        self.phase_seconds[self.phase] += now - self._entered
        self.phase, self._entered = name, now
        if self.on_enter is not None:
            self.on_enter(name)

    def step_done(self, samples: int) -> float:
        """Count a step and the samples that all ranks saw in it; return the training time so far."""
        self.samples += samples
        self.steps += 1
        self._last_step = self._clock() - self._started - self._excluded[0]
        return self._last_step

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Leave out what happens inside, such as evaluation; of nested pauses the outer one counts."""
        if self._paused_at is not None:
            yield
            return
        before = self._paused_at = self._totals()
        self._show(name)
        try:
            yield
        finally:
            spent = [now - then for now, then in zip(self._totals(), before, strict=True)]
            seconds, data, communication = self._excluded
            self._excluded = (seconds + spent[0], data + spent[1], communication + spent[2])
            self.pauses[name] = self.pauses.get(name, 0.0) + spent[0]
            self._paused_at = None
            self._show(self.phase)

    def leave_out(self, name: str, seconds: float) -> None:
        """Count seconds that have just passed, such as those of a compilation, as a pause; within one they are its own.

        Called where something ends that begins inside a phase, perhaps in a thread of torch's, which the phase waits
        for. Such seconds are not in the phase either.
        """
        if self._paused_at is not None:
            return
        self._excluded = (self._excluded[0] + seconds, *self._excluded[1:])
        self.pauses[name] = self.pauses.get(name, 0.0) + seconds
        self._entered += seconds

    def _totals(self) -> tuple[float, float, float]:
        return self._clock(), self.data_wait(), self.communication() or 0.0

    def _show(self, name: str) -> None:
        """Show a profiler that something within the current phase begins, or that it ended."""
        if self.on_enter is not None:
            self.on_enter(name)

    def read(self, *, at_last_step: bool = False) -> Reading:
        """Return what was counted so far; `at_last_step`: the seconds up to the end of the last step."""
        totals = self._paused_at or self._totals()
        seconds, data, communication = (now - out for now, out in zip(totals, self._excluded, strict=True))
        seconds = self._last_step if at_last_step else seconds - self._started
        own_seconds = self.phase_seconds["data"] + self.phase_seconds["forward"]
        return Reading(seconds, self.samples, self.steps, data, communication, own_seconds)

    def warmed_up(self) -> None:
        """Leave what was counted so far out of the average rate."""
        self.warm_up = self.read()

    def lap(self) -> tuple[float, float]:
        """Return samples per second and seconds per step since the last lap, and begin a new one."""
        now = (self.seconds, self.samples, self.steps)
        seconds, samples, steps = (new - old for new, old in zip(now, self._mark, strict=True))
        warm = max(self._mark, self.warm_up[:3])
        if now[2] > warm[2]:
            self._laps.append((now[0] - warm[0], now[2] - warm[2]))
        self._mark = now
        return _ratio(samples, seconds), _ratio(seconds, steps)

    @property
    def average(self) -> float:
        """Samples per second of training time after the first steps; of those alone where there are no others yet.

        The time after the last step is not part of it, where a lap has ended with that step.
        """
        end = self._mark if self._mark[2] == self.steps else (self.seconds, self.samples)
        warm = self.warm_up if self.samples > self.warm_up.samples else (0.0, 0)
        return _ratio(end[1] - warm[1], end[0] - warm[0])

    @property
    def slow_laps(self) -> SlowLaps:
        """The laps that took more than twice the usual time per step; none where there are fewer than three."""
        if len(self._laps) < 3:
            return SlowLaps(0.0, 0, len(self._laps))
        usual = statistics.median(seconds / steps for seconds, steps in self._laps)
        slow = [seconds for seconds, steps in self._laps if seconds / steps > 2 * usual]
        return SlowLaps(sum(slow), len(slow), len(self._laps))


def _ratio(amount: float, per: float) -> float:
    return amount / per if per > 0 else 0.0
