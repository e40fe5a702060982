"""Monitoring: write metrics over ranks, a watch for slow ranks, a step profiler and gradient compression.

``python template_monitoring.py`` starts 2 ranks; ``phalanx learn check`` grades what is written.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor


@dataclass(frozen=True)
class Summary:
    """One metric over all steps of an interval and all ranks."""

    mean: float
    """Weighted by samples."""
    minimum: float
    maximum: float
    rank: int
    """The rank that had the maximum."""
    p50: float
    """The median of the values, one per step and rank, as torch.quantile gives it."""
    p95: float


class MetricWindow:
    """Metrics of the steps since the last report; only the report communicates, once for all metrics."""

    def __init__(self, names: Sequence[str], capacity: int) -> None:
        self.names, self.capacity = tuple(names), capacity

    def add(self, samples: int, **values: Tensor | float) -> None:
        """Keep the values of one step; does not communicate, does not wait for the device, keeps no graph.

        ``values`` has all names. A tensor may carry a graph, and the caller may use it again for the next step.
        """
        # TODO metrics-over-ranks: keep the values of a step, and let reduce() send them all in one collective.
        #   Hints, one at a time: phalanx learn hint metrics-over-ranks
        raise NotImplementedError("MetricWindow")

    def reduce(self) -> dict[str, Summary]:
        """Return the summaries over all ranks, the same on each, with one collective; begin a new interval.

        Ranks may have added different numbers of steps, up to ``capacity`` each.
        """
        # Part of TODO metrics-over-ranks.
        raise NotImplementedError("MetricWindow")


@dataclass(frozen=True)
class Stragglers:
    """The ranks that the others wait for."""

    ranks: list[int]
    slowdown: dict[int, float]
    """For each of them: its median compute time over the steps, divided by the median of all ranks' such medians.

    Of an even number of values the median is the mean of the two in the middle, as torch.quantile gives it.
    """
    lost: float
    """Seconds per step that the run would gain without them: the slowest of all against the slowest of the others."""
    transfer: float
    """Seconds per step that the communication itself takes, without waiting for slow ranks."""


class StragglerWatch:
    """Compute and waiting time of every step of this rank, and the judgement over all ranks."""

    def __init__(self, factor: float = 1.3) -> None:
        self.factor = factor

    def step(self, compute: Callable[[], None], communicate: Callable[[], None]) -> None:
        """Run one step and note how long it computed and how long it was in the communication.

        On a GPU, compute() must end with torch.cuda.synchronize(), or the clock sees only how long the launches took.
        """
        # TODO find-stragglers: measure compute() and communicate() apart, gather the times, name the slow ranks.
        #   Hints, one at a time: phalanx learn hint find-stragglers
        raise NotImplementedError("StragglerWatch")

    def report(self) -> Stragglers:
        """Return the judgement over all ranks, the same on each, with one collective; begin a new interval.

        All ranks have made the same number of steps since the last report.
        """
        # Part of TODO find-stragglers.
        raise NotImplementedError("StragglerWatch")

    def judge(self, compute: Tensor, waiting: Tensor) -> Stragglers:
        """Name the ranks whose usual compute time is above ``factor`` times that of all; arguments: [ranks, steps].

        A single slow step does not make a rank slow, and a fast rank does not make the others slow. There may be none.
        """
        # Part of TODO find-stragglers.
        raise NotImplementedError("StragglerWatch")


class StepProfiler:
    """Where the time of a step goes: named parts, which may be nested, and the rest as "other"."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step; a step that an exception ends is not counted.

        The exception goes on to the caller, and the profiler can be used for the next step.
        """
        # TODO profile-step: measure a step as the sum of its parts, with nested parts, exceptions and small cost.
        #   Hints, one at a time: phalanx learn hint profile-step
        raise NotImplementedError("StepProfiler")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part; the time of parts inside it counts for them alone.

        A name may come several times in a step. The memory of the profiler does not grow with the number of steps.
        """
        # Part of TODO profile-step.
        raise NotImplementedError("StepProfiler")

    def summary(self) -> dict[str, float]:
        """Return the mean seconds per step of each part, and of the whole "step", which is their sum."""
        # Part of TODO profile-step.
        raise NotImplementedError("StepProfiler")


class GradientCompressor:
    """Top-k with error feedback: the largest entries are sent, the rest is kept and added to the next gradient."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.residuals: dict[str, Tensor] = {}

    def compress(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and the flat indices to send; what is not sent is in ``residuals[name]``, in its shape.

        The number of entries is ``fraction`` of all, rounded down, at least 1. Sent values plus new residual are the
        gradient plus the old residual of this name. ``gradient`` itself is not changed.
        """
        # TODO compress-gradients: send the largest entries, keep the rest for the next step; quantize without bias.
        #   Hints, one at a time: phalanx learn hint compress-gradients
        raise NotImplementedError("GradientCompressor")

    def average(self, name: str, gradient: Tensor) -> Tensor:
        """Return the mean over ranks of what they send of this gradient; only the sent entries are on the wire.

        All ranks call it with gradients of the same shape, and get the same result.
        """
        # Part of TODO compress-gradients.
        raise NotImplementedError("GradientCompressor")

    @staticmethod
    def quantize(gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return int8 values in the shape of the gradient, and their scale; right on average: rounding is random.

        Each entry differs by less than one scale step, and the mean over many calls is the gradient.
        """
        # Part of TODO compress-gradients.
        raise NotImplementedError("GradientCompressor")

    @staticmethod
    def dequantize(values: Tensor, scale: Tensor) -> Tensor:
        """Return the gradient that int8 values and their scale stand for."""
        # Part of TODO compress-gradients.
        raise NotImplementedError("GradientCompressor")


def demonstrate(rank: int, world: int, folder: str) -> None:
    """Make a few steps on one rank and report."""
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=world)
    window = MetricWindow(["loss"], capacity=10)
    try:
        for step in range(5):
            window.add(samples=8, loss=1.0 / (step + 1) + rank)
        print(f"rank {rank}: {window.reduce()}")
    except NotImplementedError as error:
        print(f"rank {rank}: {error} is not written yet: look for TODO in this file")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(demonstrate, (2, tempfile.mkdtemp()), 2, start_method="fork")
