"""Out of memory: which module and phase asked for how much, what the memory is spent on, and what to change."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.diagnosis.memory_breakdown import MemoryBreakdown, optimizer_states, write_breakdown
from phalanx.errors import OutOfMemoryError, first_line
from phalanx.host.processes import host_memory
from phalanx.loop.hooks import Callback
from phalanx.loop.step_info import StepInfo
from phalanx.observe.format import size
from phalanx.strategies.base import local
from phalanx.strategies.tensors import find_blocks

if TYPE_CHECKING:
    from phalanx.loop.running_trainer import RunningTrainer

_EVERY = 5.0
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ASKED = re.compile(r"(?:Tried|tried) to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")


class _DeviceOutOfMemory(OutOfMemoryError, torch.OutOfMemoryError):
    """What code that expects torch's exception can catch."""

    __qualname__ = "OutOfMemoryError"


class MemoryWatch(Callback):
    """Keeps the breakdown of this rank's memory up to date, and explains a failed allocation."""

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Write what can be expected before the first step."""
        self._trainer = trainer
        self._on_cuda = trainer.formation.device.type == "cuda"
        self._before = 0.0 if self._on_cuda else _resident()
        self._memory_at: tuple[tuple[int, float], ...] = ()
        self._steps, self._due = 0, 0.0
        self._write()

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """Note how much is held between steps."""
        self._steps += 1
        is_power = self._steps & (self._steps - 1) == 0  # often at first: a leak may fill the memory in seconds
        if is_power or time.monotonic() >= self._due:
            self._due = time.monotonic() + _EVERY
            memory = torch.cuda.memory_allocated(trainer.formation.device) if self._on_cuda else _resident()
            self._memory_at = (*self._memory_at[:1], (info.step, float(memory)))
            self._write()

    def breakdown(self) -> MemoryBreakdown:
        """Return what the memory is spent on now."""
        formation, config = self._trainer.formation, self._trainer.config
        model, optimizer = formation.unwrap(self._trainer.model), self._trainer.optimizer
        parameters = list(model.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = _bytes(trainable)
        weights, states = _bytes(parameters), _states(optimizer)
        momentum = max((group.get("momentum") or 0.0 for group in optimizer.param_groups), default=0.0)
        expected_states = _bytes(trainable) * optimizer_states(type(optimizer).__name__, momentum)
        present = states + _bytes(parameter.grad for parameter in trainable if parameter.grad is not None)
        if self._on_cuda:
            stats = torch.cuda.memory_stats_as_nested_dict(formation.device)["allocated_bytes"]["all"]
            total, other = float(stats["peak"]), 0.0
            limit = float(torch.cuda.get_device_properties(formation.device).total_memory)
            local = formation.world.ranks_per_gpu
        else:
            total = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            limit, local, other = (
                float(host_memory()),
                formation.world.env.local_world_size,
                self._before - weights,
            )
        layout = self._trainer.train_loader.sharded.layout
        return MemoryBreakdown(
            device=formation.device.type,
            limit=limit,
            parameters=weights,
            gradients=gradients,
            optimizer=states or expected_states,
            activations=max(
                0.0, total - weights - max(present, gradients + states if self._memory_at else 0.0) - other
            ),
            other=max(0.0, other),
            ranks=formation.world_size,
            local_ranks=local,
            strategy=formation.strategy.name,
            precision=formation.precision.name,
            batch_size=layout.batch_size,
            accumulation=layout.accumulation,
            recomputes=config.recompute is not None,
            blocks=len(find_blocks(model)),
            held=self._memory_at,
        )

    def explained(self, error: Exception) -> Exception:
        """Return an error that says where memory ran out, and why; errors about other things as they are."""
        is_cuda = isinstance(error, torch.OutOfMemoryError)
        if not (is_cuda or "DefaultCPUAllocator: " in str(error)) or not hasattr(self, "_trainer"):
            return error
        match = _ASKED.search(str(error))
        nbytes = float(match[1]) * _UNITS[match[2]] if match else 0.0
        where = self._where(error.__traceback__)
        text = f"out of memory in {self._trainer.formation.clock.phase}{where}"
        if nbytes:
            text += f": {size(nbytes)} more were asked for"
        kind = _DeviceOutOfMemory if is_cuda else OutOfMemoryError
        return kind("\n".join([text, *self.breakdown().lines(nbytes)]), hint=first_line(error))

    def _where(self, frames: TracebackType | None) -> str:
        """Return the innermost module that was running, and the line that it was at."""
        model = self._trainer.formation.unwrap(self._trainer.model)
        names = {id(module): name for name, module in model.named_modules()}
        location = ""
        while frames is not None:
            module = frames.tb_frame.f_locals.get("self")
            if isinstance(module, nn.Module) and names.get(id(module)):
                code = frames.tb_frame.f_code.co_filename
                label = f"{names[id(module)]} ({type(module).__name__})"
                location = f" of {label}, {Path(code).name}:{frames.tb_lineno}"
            frames = frames.tb_next
        return location

    def _write(self) -> None:
        folder = os.environ.get("PHALANX_LOG_DIR", "")
        if folder:
            slot = os.environ.get("PHALANX_SLOT") or os.environ.get("RANK", "0")
            write_breakdown(self.breakdown(), Path(folder), int(slot))


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    """Return the bytes of this rank's parts."""
    return float(sum(local(tensor).nbytes for tensor in tensors))


def _states(optimizer: Any) -> float:
    """Return the bytes of the states that the optimizer has."""
    states = getattr(optimizer, "state", {})
    return _bytes(value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor))


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
