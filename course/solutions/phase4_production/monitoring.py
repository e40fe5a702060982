"""Metrics over ranks, stragglers, a step profiler and gradient compression; as a script: what 2 ranks measure."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
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
        self.rows: list[list[Tensor]] = []

    def add(self, samples: int, **values: Tensor | float) -> None:
        """Keep the values of one step; does not communicate, does not wait for the device, keeps no graph."""
        row = [torch.as_tensor(values[name]).detach().clone() for name in self.names]
        self.rows.append([torch.tensor(samples), *row])

    def reduce(self) -> dict[str, Summary]:
        """Return the summaries over all ranks, the same on each, with one collective; begin a new interval."""
        own = torch.full((self.capacity, 1 + len(self.names)), torch.nan, dtype=torch.float64)
        for number, row in enumerate(self.rows):
            own[number] = torch.stack([value.double().cpu() for value in row])
        self.rows = []
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        every = torch.cat(gathered)
        ranks = torch.arange(len(every)) // self.capacity
        used = ~every[:, 0].isnan()
        samples, ranks = every[used, 0], ranks[used]
        columns = every[used, 1:].T
        return {name: self._summary(column, samples, ranks) for name, column in zip(self.names, columns, strict=True)}

    @staticmethod
    def _summary(values: Tensor, samples: Tensor, ranks: Tensor) -> Summary:
        mean = (values * samples).sum() / samples.sum()
        p50, p95 = torch.quantile(values, torch.tensor([0.5, 0.95], dtype=values.dtype)).tolist()
        rank = int(ranks[values.argmax()])
        return Summary(mean.item(), values.min().item(), values.max().item(), rank, p50, p95)


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
        self.times: list[tuple[float, float]] = []

    def step(self, compute: Callable[[], None], communicate: Callable[[], None]) -> None:
        """Run one step and note how long it computed and how long it was in the communication."""
        began = time.perf_counter()
        compute()
        computed = time.perf_counter()
        communicate()
        self.times.append((computed - began, time.perf_counter() - computed))

    def report(self) -> Stragglers:
        """Return the judgement over all ranks, the same on each, with one collective; begin a new interval."""
        own = torch.tensor(self.times, dtype=torch.float64)
        self.times = []
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        compute, waiting = torch.stack(every).unbind(2)
        return self.judge(compute, waiting)

    def judge(self, compute: Tensor, waiting: Tensor) -> Stragglers:
        """Name the ranks whose usual compute time is above ``factor`` times that of all; arguments: [ranks, steps]."""
        usual = compute.quantile(0.5, dim=1)
        slowdown = usual / usual.quantile(0.5)
        slow = slowdown > self.factor
        lost = compute.amax(0) - compute[~slow].amax(0)
        ranks = slow.nonzero().flatten().tolist()
        transfer = waiting.amin(0)  # the rank that comes last waits for no other
        shown = {rank: slowdown[rank].item() for rank in ranks}
        return Stragglers(ranks, shown, lost.mean().item(), transfer.mean().item())


class StepProfiler:
    """Where the time of a step goes: named parts, which may be nested, and the rest as "other"."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.steps = 0
        self.totals: dict[str, float] = {}
        self.current: dict[str, float] = {}
        self.inner: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step; a step that an exception ends is not counted."""
        self.current, self.inner = {}, []
        with self.part("other"):
            yield
        self.steps += 1
        for name, seconds in self.current.items():
            self.totals[name] = self.totals.get(name, 0.0) + seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part; the time of parts inside it counts for them alone."""
        self.inner.append(0.0)
        began = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - began
            own = seconds - self.inner.pop()
            self.current[name] = self.current.get(name, 0.0) + own
            if self.inner:
                self.inner[-1] += seconds

    def summary(self) -> dict[str, float]:
        """Return the mean seconds per step of each part, and of the whole "step", which is their sum."""
        parts = {name: seconds / self.steps for name, seconds in self.totals.items()}
        return {**parts, "step": sum(parts.values())}


class GradientCompressor:
    """Top-k with error feedback: the largest entries are sent, the rest is kept and added to the next gradient."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.residuals: dict[str, Tensor] = {}

    def compress(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and the flat indices to send; what is not sent is in ``residuals[name]``, in its shape."""
        total = gradient.detach().clone()
        if name in self.residuals:
            total += self.residuals[name].to(total.device)
        flat = total.view(-1)
        count = max(1, int(flat.numel() * self.fraction))
        indices = flat.abs().topk(count).indices
        values = flat[indices]
        flat[indices] = 0.0
        self.residuals[name] = total
        return values, indices

    def average(self, name: str, gradient: Tensor) -> Tensor:
        """Return the mean over ranks of what they send of this gradient; only the sent entries are on the wire."""
        world = dist.get_world_size()
        values, indices = self.compress(name, gradient)
        places = indices.to(torch.int32)
        all_values = [torch.empty_like(values) for _ in range(world)]
        all_places = [torch.empty_like(places) for _ in range(world)]
        dist.all_gather(all_values, values)
        dist.all_gather(all_places, places)
        result = torch.zeros_like(gradient).view(-1)
        result.index_add_(0, torch.cat(all_places).long(), torch.cat(all_values))
        return result.view_as(gradient) / world

    @staticmethod
    def quantize(gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return int8 values in the shape of the gradient, and their scale; right on average: rounding is random."""
        scale = gradient.abs().max() / 127
        if scale == 0:
            return torch.zeros_like(gradient, dtype=torch.int8), scale
        exact = gradient / scale
        rounded = (exact + torch.rand_like(exact)).floor()
        return rounded.clamp(-127, 127).to(torch.int8), scale

    @staticmethod
    def dequantize(values: Tensor, scale: Tensor) -> Tensor:
        """Return the gradient that int8 values and their scale stand for."""
        return values.float() * scale


def demonstrate(rank: int, world: int, folder: str) -> None:
    """Measure a few steps on one rank; rank 1 is slow."""
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=world)
    torch.manual_seed(rank)
    window, watch = MetricWindow(["loss"], capacity=10), StragglerWatch()
    for step in range(5):
        watch.step(lambda: time.sleep(0.06 if rank == 1 else 0.02), dist.barrier)
        window.add(samples=8, loss=1.0 / (step + 1) + rank)
    loss, slow = window.reduce()["loss"], watch.report()
    compressor, gradient = GradientCompressor(0.01), torch.randn(1000)
    mean = compressor.average("weight", gradient)
    if rank == 0:
        print(f"loss: mean {loss.mean:.4f}, from {loss.minimum:.4f} to {loss.maximum:.4f} (rank {loss.rank})")
        print(f"stragglers: {slow.ranks}")
        print(f"top-k: {mean.count_nonzero()} of 1000 entries, {compressor.residuals['weight'].count_nonzero()} kept")
        values, scale = GradientCompressor.quantize(gradient)
        error = (GradientCompressor.dequantize(values, scale) - gradient).abs().max() / scale
        print(f"int8: {values.numel()} bytes for {gradient.numel() * 4}, largest error below one step: {error < 1}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(demonstrate, (2, tempfile.mkdtemp()), 2, start_method="fork")
