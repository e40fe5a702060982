"""`PerformanceMonitor`: named timers for your own loop, with a summary."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from phalanx.errors import UsageError, a_type, unknown_name
from phalanx.observe.format import table

_END = object()


class PerformanceMonitor:
    """Measures named parts of a program: `start_timer("forward")`, `end_timer("forward")`, `summary()`.

    On CUDA a timer waits for the device before it starts and ends, so that it measures the work and not its launch.
    """

    def __init__(self, *, synchronize: bool = True) -> None:
        """`synchronize`: wait for the CUDA device at each timer, where torch uses one."""
        self._synchronize = synchronize
        self._running: dict[str, float] = {}
        self.timings: dict[str, list[float]] = {}
        """Seconds of every measurement, by the timer's name."""

    def start_timer(self, name: str) -> None:
        """Start a timer."""
        if name in self._running:
            raise UsageError(f"the timer {name!r} is running already", hint=f"End it first: end_timer({name!r})")
        self._wait()
        self._running[name] = time.perf_counter()

    def end_timer(self, name: str) -> float:
        """End a timer and return its seconds."""
        self._wait()
        now = time.perf_counter()
        if name not in self._running:
            running = sorted(self._running)
            problem = unknown_name("timer", name, running) if running else f"the timer {name!r} was not started"
            raise UsageError(problem, hint=f"Start it first: start_timer({name!r})")
        seconds = now - self._running.pop(name)
        self.timings.setdefault(name, []).append(seconds)
        return seconds

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Measure a block: `with monitor.timer("forward"): ...`."""
        self.start_timer(name)
        try:
            yield
        finally:
            self.end_timer(name)

    def summary(self) -> dict[str, dict[str, float]]:
        """Return for each timer how often it ran, and its total, mean, median, 95th percentile and longest seconds."""
        return {
            name: {
                "count": len(values),
                "total": sum(values),
                "mean": statistics.fmean(values),
                "median": statistics.median(values),
                "p95": sorted(values)[max(0, -(-95 * len(values) // 100) - 1)],
                "max": max(values),
            }
            for name, values in self.timings.items()
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("timer", "count", "total s", "mean ms", "median ms", "p95 ms", "max ms")]
        for name, row in self.summary().items():
            values = [f"{row[key] * 1e3:.2f}" for key in ("mean", "median", "p95", "max")]
            rows.append((name, str(row["count"]), f"{row['total']:.3f}", *values))
        return table(rows)

    def monitor_training(
        self, trainer: object, data_loader: Iterable[Any], num_steps: int = 100
    ) -> dict[str, dict[str, float]]:
        """Run up to `num_steps` steps, measure data, step and total, and return the summary.

        `trainer`: an object with `train_step(*batch)`, such as `train_step(data, target)`, or a function of a batch.
        """
        step = _step_of(trainer)
        with self.timer("total_training"):
            batches = islice(data_loader, num_steps)
            while True:
                self.start_timer("data")
                batch = next(batches, _END)
                if batch is _END:
                    del self._running["data"]
                    break
                self.end_timer("data")
                with self.timer("train_step"):
                    step(batch)
        return self.summary()

    def _wait(self) -> None:
        torch = sys.modules.get("torch")  # a program without torch needs no CUDA either
        if self._synchronize and torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _step_of(trainer: object) -> Callable[[Any], Any]:
    method = getattr(trainer, "train_step", None)
    if callable(method):
        return lambda batch: method(*batch) if isinstance(batch, (tuple, list)) else method(batch)
    if callable(trainer):
        function: Callable[[Any], Any] = trainer
        return function
    raise UsageError(
        f"monitor_training got {a_type(trainer)}, which has no train_step",
        hint="Give an object with train_step(data, target), or a function of one batch. A trainer of Phalanx measures "
        "itself: fit(..., profile='steps=10:15').",
    )
