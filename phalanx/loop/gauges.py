"""What this rank measures about itself while it trains, about once per second, for `phalanx top` and the like."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from phalanx.host.cgroups import host_memory
from phalanx.host.gpus import GpuReading, GpuSensor
from phalanx.loop.phases import StepPhases
from phalanx.loop.speed import PeakMemory
from phalanx.observe import rank_table
from phalanx.observe.events import RanksReported
from phalanx.observe.heartbeat import Gauges, current, read_beats
from phalanx.world.world import World

_EVERY = 1.0
_REPORT_SECONDS = 10.0
_MOST_OF_TIME = 0.005
"""The share of the time that reports may take: of ten thousand ranks one takes a third of a second."""
_FIRST_REPORT = 3.0
"""Short runs have a report as well."""


class RankGauges:
    """Writes the gauges of this rank beside its heartbeat; on the main rank also reports those of all ranks."""

    def __init__(
        self,
        world: World,
        phases: StepPhases,
        data_wait: Callable[[], float],
        communication: Callable[[], float | None],
        emit: Callable[[RanksReported], None] | None,
    ) -> None:
        """`data_wait`, `communication`: seconds waited so far; `emit`: takes the report, on the main rank."""
        self._phases, self._data_wait, self._communication, self._emit = phases, data_wait, communication, emit
        self._ranks = world.world_size
        self.memory = PeakMemory(world.device)
        self._limit = _memory_limit(world)
        self._sensor = _sensor(world.device)
        self.gpu = GpuReading()
        self._samples = self._steps = 0
        self._last_step = time.monotonic()
        self._mark = (self._last_step, 0, 0, 0.0, 0.0, 0.0)
        self._due = self._last_step + _EVERY
        self._report_at = self._last_step + _FIRST_REPORT

    def step_done(self, samples: int) -> None:
        """Count a step and the samples that all ranks saw in it."""
        self._samples += samples
        self._steps += 1
        self._last_step = time.monotonic()
        if self._last_step >= self._due:
            self._write()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of evaluation and checkpoints: a step would seem as long as these."""
        before = time.monotonic(), self._data_wait(), self._communication() or 0.0
        yield
        seconds, waited, talked = time.monotonic(), self._data_wait(), self._communication() or 0.0
        now, samples, steps, data, talk, own = self._mark
        spent = seconds - before[0]
        self._mark = (now + spent, samples, steps, data + waited - before[1], talk + talked - before[2], own)
        self._last_step += spent

    def _write(self) -> None:
        now, own = self._last_step, self._phases.own
        waited, talked = self._data_wait(), self._communication()
        mark = (now, self._samples, self._steps, waited, talked or 0.0, own)
        seconds, samples, steps, data, talk, work = (new - old for new, old in zip(mark, self._mark, strict=True))
        self._mark, self._due = mark, now + _EVERY
        if self._sensor is not None:
            self.gpu = self._sensor.read()
        current().gauge(
            Gauges(
                samples_per_second=samples / seconds / self._ranks,
                step_seconds=seconds / steps,
                data_wait=data / seconds,
                communication=math.nan if talked is None else talk / seconds,
                own_seconds=work / steps,
                memory=float(self.memory.bytes()),
                memory_limit=self._limit,
                gpu_utilization=_known(self.gpu.utilization),
                gpu_memory=_known(self.gpu.memory),
                gpu_power=_known(self.gpu.power),
                gpu_temperature=_known(self.gpu.temperature),
                data_wait_seconds=waited,
                communication_seconds=math.nan if talked is None else talked,
            )
        )
        if self._emit is not None and now >= self._report_at:
            self.report()

    def report(self) -> None:
        """Report all ranks that can be seen from here; without a launcher this one."""
        if self._emit is None:
            return
        began = time.monotonic()
        folder = os.environ.get("PHALANX_LOG_DIR", "")
        beats = read_beats(Path(folder)) if folder else {}
        if not beats and (own := current().read(0)) is not None:
            beats = {0: own}
        if beats:
            self._emit(rank_table.report(beats))
        ended = time.monotonic()
        self._report_at = ended + max(_REPORT_SECONDS, (ended - began) / _MOST_OF_TIME)

    def end(self) -> None:
        """Report once more, where steps were taken since the last time."""
        if self._steps > self._mark[2]:
            self._write()
        self.report()


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _memory_limit(world: World) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory / world.ranks_per_gpu)
    return host_memory() / world.env.local_world_size  # ranks of a machine share it


def _sensor(device: torch.device) -> GpuSensor | None:
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)  # its stubs do not know the address
    return GpuSensor(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")
