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
        #   Hint 1: What costs more in a step of 5 ms: a number that stays where it is, or one that travels? How often
        #     is it looked at?
        #   Hint 2: Keep detached copies of the tensors (item() would wait for the GPU). In reduce(), make one tensor of
        #     a shape that is the same on all ranks, with the samples of each step beside the values, and all_gather it.
        #   Hint 3: The tensor has `capacity` rows; rows that are not used hold NaN or 0 samples and are left out
        #     afterwards. The row number tells the rank. Weigh by samples for the mean, take quantiles over all rows,
        #     empty the window.
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
        #   Hint 1: In synchronous training all ranks need the same time for a step. What differs between the slow rank
        #     and the others?
        #   Hint 2: The slow rank has much compute time and little waiting time, the others the reverse. Medians are not
        #     moved by one slow step or one slow rank; means are.
        #   Hint 3: The median over steps per rank, divided by the median of these over ranks, is the slowdown; those
        #     above `factor` are named. lost: per step, the largest compute time of all minus the largest of the others,
        #     then the mean. transfer: per step, the smallest waiting time, then the mean.
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
        #   Hint 1: If "backward" contains "communication", to which of them does a second of communication belong?
        #   Hint 2: Keep a stack: when an inner part ends, its whole time is known and can be taken from the part around
        #     it. try/finally (or __exit__) runs when an exception passes, too.
        #   Hint 3: On entry push 0.0; on exit pop what the inner parts took, add (elapsed - inner) to this part, and
        #     add the elapsed time to the entry below. The step is the outermost part, its own time is "other". Add a
        #     step to the sums only when it has ended without an exception.
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
        #   Hint 1: An entry that is too small to be sent today: what happens to it if it is dropped in each step? And
        #     if it is added to that of tomorrow?
        #   Hint 2: topk of the absolute values of gradient plus residual gives the places; the residual is the rest,
        #     with 0 at the places that are sent. average() needs the values and the places of all ranks (all_gather);
        #     index_add_ or scatter_add_ adds where two ranks have the same place.
        #   Hint 3: At least one entry is sent. Divide the sum by the number of ranks. For int8, the scale is the
        #     largest absolute value over 127; x / scale is rounded down or up at random, up with the probability of its
        #     fraction (floor of x / scale + a uniform random number does that; clamp it to -127 and 127, as rounding
        #     can make it 128, which is -128 in int8). A gradient of zeros has no scale to divide by.
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
