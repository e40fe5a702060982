"""What this rank measures while it trains: gauges for `phalanx top`, tokens per second, MFU, peak memory."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from phalanx import torch_compat
from phalanx.features import feature
from phalanx.host.gpus import GpuReading, GpuSensor
from phalanx.host.processes import host_memory
from phalanx.model import CountsFlops, implements
from phalanx.observe import rank_statistics
from phalanx.observe.events import Event, Goodput, RanksReported
from phalanx.observe.goodput import EVENTS, Ledger, account, read_events
from phalanx.observe.heartbeat import Gauges, current, read_beats
from phalanx.observe.history import History
from phalanx.observe.step_clock import StepClock
from phalanx.world.world import World

if TYPE_CHECKING:
    from phalanx.loop.formation_state import FormationState

_EVERY = 1.0
_REPORT_SECONDS = 10.0
_MOST_OF_TIME = 0.005
"""The share of the time that reports may take: of ten thousand ranks one takes a third of a second."""
_FIRST_REPORT = 3.0
"""Short runs have a report as well."""


class RankGauges:
    """Writes the gauges of this rank beside its heartbeat; on the main rank also reports those of all ranks."""

    def __init__(self, world: World, clock: StepClock, emit: Callable[[RanksReported], None] | None) -> None:
        """`emit`: takes the report, on the main rank."""
        self._clock, self._emit = clock, emit
        self._ranks = world.world_size
        self.memory = PeakMemory(world.device)
        self._limit = _memory_limit(world)
        self._sensor = _sensor(world.device)
        self.gpu = GpuReading()
        self._mark = clock.read(at_last_step=True)
        self._busy = time.process_time(), time.monotonic()
        self._due, self._report_at = _EVERY, _FIRST_REPORT

    def after_step(self, seconds: float) -> None:
        """Write the gauges where that is due; `seconds`: the training time so far."""
        if seconds >= self._due:
            self._write()

    def _write(self) -> None:
        clock, talked = self._clock, self._clock.communication()
        now = clock.read(at_last_step=True)
        seconds, samples, steps, data, talk, own_seconds = (new - old for new, old in zip(now, self._mark, strict=True))
        self._mark, self._due = now, now.seconds + _EVERY
        if self._sensor is not None:
            self.gpu = self._sensor.read()
        current().gauge(
            Gauges(
                samples_per_second=samples / seconds / self._ranks,
                step_seconds=seconds / steps,
                data_wait=data / seconds,
                communication=math.nan if talked is None else talk / seconds,
                own_seconds=own_seconds / steps,
                memory=float(self.memory.bytes()),
                memory_limit=self._limit,
                gpu_utilization=_known(self.gpu.utilization),
                gpu_memory=_known(self.gpu.memory),
                gpu_power=_known(self.gpu.power),
                gpu_temperature=_known(self.gpu.temperature),
                data_wait_seconds=clock.data_wait(),
                communication_seconds=_known(talked),
                cpu_cores=self._busy_cores(),
            )
        )
        if self._emit is not None and now.seconds >= self._report_at:
            self.report()

    def _busy_cores(self) -> float:
        """Return the cores that were busy since the last call, over all of the time: evaluation uses them too."""
        last, self._busy = self._busy, (time.process_time(), time.monotonic())
        return (self._busy[0] - last[0]) / max(self._busy[1] - last[1], 1e-9)

    def report(self) -> None:
        """Report all ranks that can be seen from here; without a launcher this one."""
        if self._emit is None:
            return
        began = self._clock.seconds
        folder = os.environ.get("PHALANX_LOG_DIR", "")
        beats = read_beats(Path(folder)) if folder else {}
        if not beats and (beat := current().read(0)) is not None:
            beats = {0: beat}
        if beats:
            self._emit(rank_statistics.report(beats))
        ended = self._clock.seconds
        self._report_at = ended + max(_REPORT_SECONDS, (ended - began) / _MOST_OF_TIME)

    def end(self) -> None:
        """Report once more, where steps were taken since the last time."""
        if self._clock.steps > self._mark.steps:
            self._write()
        self.report()


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _memory_limit(world: World) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory / world.ranks_per_gpu)
    return host_memory() / world.env.local_world_size  # ranks of a node share it


def _sensor(device: torch.device) -> GpuSensor | None:
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # its stubs do not know the address
    return GpuSensor(f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0")


@dataclass(frozen=True)
class TokenRate:
    """Converts samples per second to tokens per second and, where the peak is known, to MFU."""

    tokens_per_sample: int = 0
    peak_share_per_token: float | None = None

    def tokens(self, samples_per_second: float) -> float | None:
        """Return tokens per second over all ranks; None for a model without tokens."""
        return samples_per_second * self.tokens_per_sample if self.tokens_per_sample else None

    def mfu(self, samples_per_second: float) -> float | None:
        """Return the model's operations as a share of all devices' peak."""
        tokens = self.tokens(samples_per_second)
        return None if tokens is None or self.peak_share_per_token is None else tokens * self.peak_share_per_token


class CompileCount(Protocol):
    """Counts what torch.compile compiles in this process (`speed/compilation.py`)."""

    seconds: float

    @property
    def graphs(self) -> int:
        """How many graphs were made so far."""

    def watch(self, first_step: int) -> Callable[[], None]:
        """Watch from now on, and return what ends it."""

    def step_done(self) -> None:
        """Report what was compiled up to the end of a step, if anything."""


class RunSpeed:
    """How fast the run is: throughput, tokens, MFU, and the share of the time in which it trains (goodput)."""

    def __init__(self, formation: FormationState, run_dir: Path, emit: Callable[[Event], None]) -> None:
        self._formation, self._run_dir, self._emit = formation, run_dir, emit
        self._reference = formation.config.reference_throughput
        self.clock = formation.clock
        self.clock.communication = self._communication
        world = formation.world
        self.ledger = Ledger(self.clock, attempt=world.env.attempt + world.env.generation, launched=world.is_launched)
        self.tokens = TokenRate()
        self._compiles: CompileCount | None = None
        self._first_step = self._first_samples = 0

    def begin(self, step: int, samples: int) -> None:
        """Start the clock; `step`, `samples`: taken before."""
        self._first_step, self._first_samples = step, samples
        self.clock.start()
        self.ledger.begin()
        # A model that the user has compiled is watched as well: then torch has imported its compiler.
        if self._formation.config.compile or torch_compat.is_compiler_loaded():
            self._compiles = feature("compile-watch")(self.clock, self._emit)
            self._formation.undo_later(self._compiles.watch(step))

    def step_done(self) -> None:
        """Report what was compiled up to the end of a step, if anything."""
        if self._compiles is not None:
            self._compiles.step_done()

    def _communication(self) -> float | None:
        sent = self._formation.strategy.comm_stats()
        return sent.waited_s if sent else None

    def report(self, samples: int) -> Goodput:
        """Report where the time of this attempt went so far; `samples`: of the run so far."""
        rate, step = self.clock.average, self._first_step + self.clock.steps
        counts = (self._first_samples, samples)
        event = self.ledger.event(step, self._first_step, counts, rate, self.tokens.mfu(rate))
        self._emit(event)
        return event

    def close(self, samples: int, history: History) -> None:
        """Report the attempt, and note the whole run: this attempt and the earlier ones in the run's events."""
        self.step_done()
        last = self.report(samples)
        if not self._formation.is_main:
            return
        run = account([*read_events(self._run_dir / EVENTS), last.to_dict()])
        if run is not None:
            history.goodput, history.whole_throughput, history.whole_mfu = (
                run.seconds,
                run.throughput,
                run.mfu,
            )

    def speedup(self, rate: float) -> float | None:
        """Return a throughput over that of `reference_throughput`, where it is given."""
        return None if self._reference is None else rate / self._reference

    def write_to(self, history: History) -> None:
        """Write throughput and traffic so far into the history."""
        history.throughput = rate = self.clock.average
        history.first_steps_seconds = self.clock.warm_up.seconds
        if self._compiles is not None:
            history.compile_seconds, history.compile_graphs = self._compiles.seconds, self._compiles.graphs
        history.slow_seconds, history.slow_laps, history.laps = self.clock.slow_laps
        history.tokens_per_second, history.mfu = self.tokens.tokens(rate), self.tokens.mfu(rate)
        history.speedup = self.speedup(rate)
        sent = self._formation.strategy.comm_stats()  # of this run only, also after a resumption
        history.sent_bytes = sent.sent_bytes if sent else None
        history.plain_bytes = sent.plain_bytes if sent else None
        history.exchange_hidden = sent.hidden_s if sent else None
        history.exchange_waited = sent.waited_s if sent else None


class PeakMemory:
    """The peak memory of this rank: the device's on CUDA, the process's on the CPU.

    Reading it takes up to half a millisecond, as long as a small step, so it is read once per second at most.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_at = -math.inf
        self._peak = 0

    def bytes(self) -> int:
        """Return the peak as it was at most a second ago."""
        now = time.monotonic()
        if now - self._read_at >= 1.0:
            self._read_at = now
            if self._device.type == "cuda":
                stats = torch.cuda.memory_stats_as_nested_dict(self._device)
                self._peak = int(stats["allocated_bytes"]["all"]["peak"])
            else:
                self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self._peak


def token_rate(model: nn.Module, batch: Any, world: World, precision: str) -> TokenRate:
    """Look at the first batch: integers [batch, time] are tokens where the model counts its operations."""
    inputs: Any = batch[0] if isinstance(batch, Sequence) and len(batch) else batch
    inputs = batch.get("tokens") if isinstance(batch, Mapping) else inputs
    is_tokens = isinstance(inputs, torch.Tensor) and inputs.ndim == 2 and not inputs.is_floating_point()
    if not is_tokens or not implements(model, CountsFlops):
        return TokenRate()
    length = int(inputs.shape[1])
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    if world.device.type != "cuda" or frozen:  # the count is that of training every weight
        return TokenRate(length)
    peak = peak_flops(torch.cuda.get_device_name(world.device), precision)
    return TokenRate(length, None if peak is None else model.flops_per_token(length) / (peak * world.world_size))


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
