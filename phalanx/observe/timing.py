"""Clocks of training time (evaluation and checkpoints are paused out), and the peak FLOPs of accelerators for MFU."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator


class Stopwatch:
    """Seconds since it was made, less those spent in `paused()`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._excluded = 0.0
        self._paused_at: float | None = None

    @property
    def seconds(self) -> float:
        """The time that counts, so far."""
        now = self._clock() if self._paused_at is None else self._paused_at
        return now - self._started - self._excluded

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside; nesting counts once."""
        if self._paused_at is not None:
            yield
            return
        self._paused_at = self._clock()
        try:
            yield
        finally:
            self._excluded += self._clock() - self._paused_at
            self._paused_at = None


class Throughput:
    """Samples per second, over the whole run without its first steps, and since it was last asked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.stopwatch = Stopwatch(clock)
        self.samples = 0
        self.steps = 0
        self._mark = (0.0, 0, 0)
        self._warm = (0.0, 0, 0)
        self._laps: list[tuple[float, int, int]] = []

    def add(self, samples: int, steps: int = 1) -> None:
        """Count samples (over all ranks) and steps that are done."""
        self.samples += samples
        self.steps += steps

    def warmed_up(self) -> None:
        """Leave what was counted so far out of the average: processes started, code was compiled."""
        self._warm = (self.stopwatch.seconds, self.samples, self.steps)

    @property
    def warm_up_seconds(self) -> float:
        """The training time that the average leaves out."""
        return self._warm[0]

    @property
    def average(self) -> float:
        """Samples per second of training time after the first steps; of those alone where there are no others yet."""
        seconds, samples, _ = self._warm if self.samples > self._warm[1] else (0.0, 0, 0)
        return _ratio(self.samples - samples, self.stopwatch.seconds - seconds)

    @property
    def steady(self) -> float:
        """Samples per second without laps that took more than twice the usual time per step, such as recompilations.

        The average of all where there are fewer than three laps.
        """
        if len(self._laps) < 3:
            return self.average
        slow = self._slow_laps()
        samples = sum(lap[1] for lap in self._laps) - sum(lap[1] for lap in slow)
        return _ratio(samples, sum(lap[0] for lap in self._laps) - sum(lap[0] for lap in slow))

    @property
    def slow_seconds(self) -> float:
        """The time of the laps that `steady` leaves out."""
        return sum(lap[0] for lap in self._slow_laps())

    def _slow_laps(self) -> list[tuple[float, int, int]]:
        if len(self._laps) < 3:
            return []
        usual = statistics.median(seconds / steps for seconds, _, steps in self._laps)
        return [lap for lap in self._laps if lap[0] / lap[2] > 2 * usual]

    def lap(self) -> tuple[float, float]:
        """Return samples per second and seconds per step since the last lap, and begin a new one."""
        now = (self.stopwatch.seconds, self.samples, self.steps)
        seconds, samples, steps = (new - old for new, old in zip(now, self._mark, strict=True))
        warm = max(self._mark, self._warm)
        if now[2] > warm[2]:
            self._laps.append((now[0] - warm[0], now[1] - warm[1], now[2] - warm[2]))
        self._mark = now
        return _ratio(samples, seconds), _ratio(seconds, steps)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Leave out what happens inside: evaluation, checkpoints."""
        return self.stopwatch.paused()


def _ratio(amount: float, per: float) -> float:
    return amount / per if per > 0 else 0.0


_TERAFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "MI300X": 1307.4,
    "MI250X": 383.0,
}
"""By what the driver calls them. The name that says more comes first: an H100 PCIe is an H100, too."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's peak in operations per second, or None when it is not known: then no MFU is reported."""
    if precision not in ("bf16", "fp16"):
        return None
    words = device_name.replace("-", " ").split()
    for name, teraflops in _TERAFLOPS.items():
        if all(part in words for part in name.split()):
            return teraflops * 1e12
    return None
