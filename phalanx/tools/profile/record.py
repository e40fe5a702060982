"""Records a trace of some steps on this rank (setting `profile`), and marks ranges for nsys.

Ranges of the loop have names with a prefix, so that the analysis finds them: `phalanx:step 10`, `phalanx:data`,
`phalanx:forward`, ..., `phalanx:all-reduce #3`, `phalanx.module:layers.0`. Nothing of this runs outside the steps.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import shlex
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from phalanx import torch_compat
from phalanx.comm.comm_thread import mark_jobs
from phalanx.config.profile import Profiling
from phalanx.errors import PhalanxError, UsageError
from phalanx.host.files import replace_file, replacing
from phalanx.loop.hooks import Callback
from phalanx.loop.step_info import StepInfo
from phalanx.tools.profile.collect import TraceExchange
from phalanx.tools.profile.findings import conclude
from phalanx.tools.profile.read import top_owners
from phalanx.tools.profile.timeline import RECORDER

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.loop.train_loop import TrainLoop

_NSYS = ("NSYS_PROFILING_SESSION_ID", "QUADD_INJECTION_PROXY", "NVTX_INJECTION64_PATH")
"""Variables that nsys sets for the programs it starts."""
_ALLOCATIONS = 200_000
_KINDS = {"evaluate": "evaluation"}

Maker = Callable[[str], AbstractContextManager[object]]


def under_nsys(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether nsys started this process."""
    return any(name in environ for name in _NSYS)


class PhaseRanges:
    """Keeps one range open per phase: each phase of the loop ends the one before."""

    def __init__(self, make: Maker, prefix: str = "") -> None:
        self._make, self._prefix = make, prefix
        self._open: AbstractContextManager[object] | None = None

    def enter(self, name: str) -> None:
        """End the open range and begin another."""
        self.leave()
        self._open = self._make(self._prefix + _KINDS.get(name, name))
        self._open.__enter__()

    def leave(self) -> None:
        """End the open range, if any."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class StepProfile(Callback):
    """Records what `Profiling` says on this rank; writes `profile/rank-N.json.gz` in the run's folder."""

    def __init__(self, plan: Profiling, formation: Formation, run_dir: Path) -> None:
        self._plan, self._formation, self._world = plan, formation, formation.world
        self._folder = run_dir / "profile"
        self._exchange = TraceExchange(plan, formation.world, self._folder)
        self._records = plan.covers(formation.rank)
        self._loop: TrainLoop
        self._next = 0
        """The step that begins with the next phase "data"."""
        self._first_step = 0
        self._recording = False
        self._finished = False
        self._profiler: Any = None
        self._phases = PhaseRanges(torch.profiler.record_function, "phalanx:")
        self._steps = PhaseRanges(torch.profiler.record_function, "phalanx:step ")
        self._nvtx = PhaseRanges(torch.cuda.nvtx.range) if plan.nvtx else None
        self._hooks: list[Any] = []
        self._modules: list[AbstractContextManager[object]] = []

    @classmethod
    def wanted(cls, formation: Formation, run_dir: Path) -> StepProfile | None:
        """Return the profile of a run that asks for one, or runs under nsys; else None."""
        plan, on_gpu = formation.config.profiling, formation.device.type == "cuda"
        if on_gpu and under_nsys():
            plan = (plan or Profiling(0, 0))._replace(nvtx=True)
        if plan is not None and plan.nvtx and not on_gpu:
            raise UsageError(
                f"profile = {formation.config.profile!r}: nvtx marks ranges for nsys, and needs ranks on GPUs",
                hint="Write profile = 'steps=10:15' for a trace, which works on CPUs.",
            )
        return None if plan is None else cls(plan, formation, run_dir)

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Check the steps and ranks against the run; begin where the first step is recorded."""
        self._loop = cast("TrainLoop", trainer)
        self._check(trainer)
        if self._nvtx is not None:
            self._formation.clock.on_enter = self._nvtx.enter
            mark_jobs(torch.cuda.nvtx.range)
        self._arm(trainer.step + 1)

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """Begin before the first step that is recorded."""
        self._arm(info.step + 1)

    def _arm(self, step: int) -> None:
        self._next = step
        # From a later step on where ranks were replaced, or the run was resumed, within these steps.
        if self._plan.first <= step <= self._plan.last and not (self._recording or self._finished):
            self._begin()

    def _check(self, trainer: RunningTrainer) -> None:
        plan, setting, total = self._plan, self._formation.config.profile, trainer.total_steps
        size = self._world.world_size
        if plan.ranks and plan.ranks[-1] >= size:
            raise UsageError(
                f"profile = {setting!r}: there is no rank {plan.ranks[-1]}",
                hint=f"The {size} rank{'s' * (size > 1)} of this run: 0 to {size - 1}.",
            )
        if total is not None and plan.first > total:
            raise UsageError(
                f"profile = {setting!r} records from step {plan.first} on, but the run has {total} steps",
                hint=f"Write steps=1:{total}, for example.",
            )
        if 0 < plan.last <= trainer.step:
            self._loop.report.say(
                f"profile = {setting!r}: nothing is recorded, for the run continues after step {trainer.step}",
                "warning",
            )

    # Recording.

    def _begin(self) -> None:
        self._recording = True
        self._exchange.compare_clocks("begin")
        self._formation.clock.on_enter = self._enter
        if self._records and torch_compat.is_profiling():
            self._records = False
            self._loop.report.say("nothing is recorded for `profile`: another torch.profiler is active here", "warning")
        if self._records:
            self._start()

    def _start(self) -> None:
        activities, on_gpu = [torch.profiler.ProfilerActivity.CPU], self._formation.device.type == "cuda"
        if on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        if on_gpu and self._plan.memory:
            torch_compat.record_allocations(_ALLOCATIONS)
        in_trace = self._plan.memory and not on_gpu
        if self._world.is_launched:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints when it starts and stops
        self._profiler = torch.profiler.profile(
            activities=activities,
            profile_memory=in_trace,
            experimental_config=torch_compat.profiler_config(all_threads=not in_trace),
        )
        self._name_modules()
        numbers = itertools.count(1)  # equal on all ranks: jobs have one order
        mark_jobs(lambda label: torch.profiler.record_function(f"phalanx:{label} #{next(numbers)}"))
        self._profiler.start()

    def _enter(self, name: str) -> None:
        """Begin the range of a phase; with the first data of a step also that of the step."""
        if name == "data" and self._next != self._first_step:
            self._first_step = self._next
            if self._records and self._formation.device.type == "cuda":
                with torch.profiler.record_function(RECORDER):
                    torch.cuda.synchronize()  # the kernels of a step belong to it, also where the host is ahead
            self._phases.leave()
            self._steps.leave()
            if self._next > self._plan.last:
                self._finish()
            elif self._records:
                self._steps.enter(str(self._next))
        if self._records and self._recording:
            self._phases.enter(name)
        if self._nvtx is not None:
            self._nvtx.enter(name)

    def _name_modules(self) -> None:
        """Record a range per call of each module of the model; compiled ones would have to be compiled anew."""
        if self._formation.config.compile:
            return
        owned = {
            id(module): name or type(module).__name__
            for model in self._formation.models
            for name, module in self._formation.unwrap(model).named_modules()
        }

        def begin(module: nn.Module, _: Any) -> None:
            if (name := owned.get(id(module))) is not None:
                self._modules.append(torch.profiler.record_function(f"phalanx.module:{name}"))
                self._modules[-1].__enter__()

        def end(module: nn.Module, _: Any, __: Any) -> None:
            if id(module) in owned and self._modules:
                self._modules.pop().__exit__(None, None, None)

        self._hooks = [
            nn.modules.module.register_module_forward_pre_hook(begin),
            nn.modules.module.register_module_forward_hook(end, always_call=True),
        ]

    def _finish(self) -> None:
        """Stop recording and write this rank's trace."""
        self._recording, self._finished = False, True
        self._detach()
        self._exchange.compare_clocks("end")
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.add_metadata_json("phalanx", json.dumps(self._metadata()))
        profiler.stop()
        try:
            self._write(profiler)
        except OSError as error:  # a full disk does not end the training
            self._loop.report.say(f"the profile of rank {self._world.rank} was not written: {error}", "warning")

    def _write(self, profiler: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        target, raw = self._exchange.path(self._world.rank), self._folder / f".rank-{self._world.rank}.json"
        try:
            profiler.export_chrome_trace(str(raw))
            with raw.open("rb") as source, replacing(target) as file, gzip.open(file, "wb", compresslevel=3) as packed:
                shutil.copyfileobj(source, packed)
        finally:
            raw.unlink(missing_ok=True)
        if self._plan.memory and self._formation.device.type == "cuda":
            self._write_allocations()

    def _detach(self) -> None:
        self._phases.leave()
        self._steps.leave()
        self._formation.clock.on_enter = None if self._nvtx is None else self._nvtx.enter
        mark_jobs(None if self._nvtx is None else torch.cuda.nvtx.range)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        while self._modules:
            self._modules.pop().__exit__(None, None, None)

    def _write_allocations(self) -> None:
        snapshot = torch_compat.allocations()
        torch_compat.record_allocations(None)
        stem = self._folder / f"rank-{self._world.rank}.memory"
        replace_file(stem.with_suffix(".memory.pickle"), pickle.dumps(snapshot))  # for pytorch.org/memory_viz
        history = snapshot["device_traces"][self._formation.device.index or 0]
        replace_file(stem.with_suffix(".memory.json"), json.dumps(top_owners(history)))

    def _metadata(self) -> dict[str, Any]:
        loop, config, world = self._loop, self._formation.config, self._world
        return {
            "format": 1,
            "rank": world.rank,
            "world_size": world.world_size,
            "ranks": list(self._plan.ranks or range(world.world_size)),
            "host": socket.gethostname(),
            "device": world.device.type,
            "main_thread": threading.get_native_id(),
            "clock": [list(reading) for reading in self._exchange.clocks],
            "torch": torch.__version__,
            "strategy": self._formation.strategy.name,
            "comm_backend": world.comm_backend or "",
            "precision": self._formation.precision.name,
            "loader_workers": loop.train_loader.sharded.num_workers,
            "cores": len(os.sched_getaffinity(0)),
            "local_ranks": world.env.local_world_size,
            "settings": config.given(),
        }

    # The end of the run.

    def on_training_end(self, trainer: RunningTrainer) -> None:
        """Collect the traces of all ranks on the main one, merge them, and report what limits the speed."""
        if self._recording:  # the run ended before the last step that was to be recorded
            self._finish()
        if self._exchange.clocks:  # else nothing was recorded
            self._exchange.collect()
            if self._formation.is_main:
                self._conclude()

    def _conclude(self) -> None:
        run_dir = self._folder.parent
        name = run_dir.name if run_dir.parent.resolve() == Path("runs").resolve() else str(run_dir)
        try:
            self._loop.report.say(f"profile: {conclude(self._folder)}")
        except (PhalanxError, OSError) as error:  # the training itself has succeeded
            self._loop.report.say(f"the profile was not analysed: {error}", "warning")
        else:
            self._loop.report.next_commands.append(f"phalanx report {shlex.quote(name)} --profile")

    def close(self) -> None:
        """Stop without communication where the run failed."""
        if self._recording:
            self._recording = False
            self._detach()
            if self._profiler is not None:
                self._profiler.stop()
                self._profiler = None
        self._formation.clock.on_enter = None
        mark_jobs(None)
        if self._nvtx is not None:
            self._nvtx.leave()
