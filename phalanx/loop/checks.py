"""Optional checks of ranks that hold replicas: equal weights (`check_replicas_every`), and ranks that are slow."""

from __future__ import annotations

import dataclasses
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from phalanx.checkpoint.collectives import gather_to_all
from phalanx.errors import CorruptionError, ReplicaError, StragglerError
from phalanx.loop.formation import Formation
from phalanx.loop.optim import OptimizerSettings
from phalanx.loop.state import shared_state
from phalanx.observe.events import RankSuspected
from phalanx.observe.step_clock import StepClock

_CHUNK = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_of(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a hash of the tensors' bits as an int64 on the device, without waiting for it; positions count."""
    weights = torch.arange(1, 2 * _CHUNK, 2, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        bits = plain.detach().contiguous().view(_BITS[plain.element_size()]).flatten()
        for chunk in torch.split(bits, _CHUNK):
            total = total * 31 + (chunk.long() * weights[: len(chunk)]).sum()  # int64 wraps around, as hashes do
    return total


class RankChecks:
    """Runs the checks that the config asks for, of several ranks; all call its methods at the same steps."""

    def __init__(self, formation: Formation, model: nn.Module, emit: Callable[[RankSuspected], None]) -> None:
        config = formation.config
        self._formation = formation
        self._model = model
        self._emit = emit
        self._every = config.check_replicas_every
        self._on_corruption, self._on_straggler = config.on_corruption, config.on_straggler
        self._factor, self._window = config.straggler_factor, config.straggler_steps
        self._checked = -1
        self._pace: OwnTime | None = None
        if self._factor is not None:
            self._pace = OwnTime(formation.clock, model, formation.device)
            if formation.world.store is not None:
                formation.world.store.set(f"host/{formation.rank}", socket.gethostname())

    def close(self) -> None:
        """Remove the hooks from the user's model."""
        if self._pace is not None:
            self._pace.close()

    def after_step(self, step: int) -> None:
        """Run what is due after a step."""
        if self._pace is not None:
            self._pace.step_ends()
            if step % self._window == 0:
                self._compare_times(step, self._pace)
        if self._every is not None and step % self._every == 0:
            self.compare_weights(step)

    def compare_weights(self, step: int) -> None:
        """Compare the replicas' weights, once per step; also before a save, so that no checkpoint has wrong ones."""
        if self._every is None or self._checked == step:
            return
        self._checked = step
        fingerprint = hash_of(self._model.parameters(), self._formation.device)
        finding = odd_replicas([int(value) for value in self._gather(fingerprint)])
        if finding is None:
            return
        replaces = self._on_corruption == "replace" and len(finding.ranks) < self._formation.world_size
        action = "replace" if replaces else "stop" if self._on_corruption == "replace" else self._on_corruption
        self._report(step, finding, action)
        if action == "stop" or (replaces and self._formation.rank in finding.ranks):
            raise CorruptionError(
                f"silent corruption at step {step}: {finding.why}",
                hint="The last checkpoint was written before. Check the memory of that node or GPU; with "
                "max_restarts the run goes on from the checkpoint, and on_corruption='warn' only reports.",
            )

    def _compare_times(self, step: int, pace: OwnTime) -> None:
        assert self._factor is not None
        times = [float(seconds) for seconds in self._gather(torch.tensor(pace.take(), device=self._formation.device))]
        finding = slow_ranks(times, self._factor)
        if finding is None:
            return
        if self._formation.is_main:
            finding = dataclasses.replace(finding, why=f"{finding.why} ({self._hosts(finding.ranks)})")
        self._report(step, finding, self._on_straggler)
        if self._on_straggler == "replace" and self._formation.rank in finding.ranks:
            raise StragglerError(f"too slow at step {step}: {finding.why}")

    def _hosts(self, ranks: Iterable[int]) -> str:
        """Return on which nodes ranks are; each wrote it into the store when the checks began."""
        store = self._formation.world.store
        assert store is not None, "several ranks have a store"
        return ", ".join(f"rank {rank} is on {store.get(f'host/{rank}').decode()}" for rank in ranks)

    def _gather(self, value: torch.Tensor) -> list[Any]:
        """Return each rank's value: a sum of vectors in which every rank has set its own place."""
        places = torch.zeros(self._formation.world_size, dtype=value.dtype, device=value.device)
        places[self._formation.rank] = value
        return self._formation.reduce(places, "sum").tolist()

    def _report(self, step: int, finding: Finding, action: str) -> None:
        self._emit(RankSuspected(step, finding.kind, list(finding.ranks), finding.why, action))


def compare_ranks(formation: Formation, model: nn.Module) -> None:
    """Raise where ranks that have formed a new group are not equal, and say in what; all ranks call this."""
    fingerprints = _comparable(formation, model)
    for name, fingerprint in fingerprints.items():
        everywhere = gather_to_all(fingerprint)
        if (odd := next((rank for rank, theirs in enumerate(everywhere) if theirs != everywhere[0]), None)) is not None:
            values = f": rank 0 has {everywhere[0]}, rank {odd} {everywhere[odd]}"
            raise ReplicaError(
                f"after the ranks had changed, step {formation.step} left them with different {name}{values}",
                hint="Callbacks must do the same on every rank; what they remember must be in their state_dict(), "
                "which a new rank receives.",
            )


def _comparable(formation: Formation, model: nn.Module) -> dict[str, Any]:
    """Return what all ranks must have equal: values themselves, of tensors a hash."""
    optimizers = formation.optimizers
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parts: dict[str, Any] = {  # not buffers: statistics of BatchNorm are those of each rank's own batches
        "learning rates": [float(group["lr"]) for group in groups],
        "optimizer settings": [{name: group.get(name) for name in OptimizerSettings.NAMES} for group in groups],
        "states of schedules, loss scale or data": shared_state(formation),
    }
    strategy = formation.strategy
    if not (strategy.shards or strategy.local_steps or strategy.owns_step) and strategy.in_lockstep:
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        moments = [tensor for state in states for tensor in state.values() if isinstance(tensor, torch.Tensor)]
        average = {} if formation.average is None else formation.average.parameters()
        parts["weights"] = int(hash_of(model.parameters(), formation.device))
        parts["states of the optimizer"] = int(
            hash_of((tensor.to(formation.device) for tensor in moments), formation.device)
        )
        parts["averaged weights"] = int(hash_of(average.values(), formation.device))
    return parts


class OwnTime:
    """A rank's own time per step, without collectives: data, forward passes, and what is done between two steps.

    The backward pass waits for the slowest rank and is equally long on all of them. On CUDA the host only launches the
    forward pass: that of one step is timed by events, which cost nothing until they are read.
    """

    def __init__(self, clock: StepClock, model: nn.Module, device: torch.device) -> None:
        self._clock = clock
        self._before = self._spent()
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._handles: list[Any] = []
        if device.type == "cuda":
            self._handles = [
                model.register_forward_pre_hook(lambda *_: self._record(0)),
                model.register_forward_hook(lambda *_: self._record(1)),
            ]

    def close(self) -> None:
        """Remove the hooks from the user's model."""
        for handle in self._handles:
            handle.remove()

    def _spent(self) -> float:
        seconds = self._clock.phase_seconds
        return seconds["data"] + seconds["forward"] + seconds["other"]

    def _record(self, slot: int) -> None:
        if len(self._events) == slot:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)

    def step_ends(self) -> None:
        """Note the end of a step."""
        now = self._spent()
        self._times.append(now - self._before)
        self._before = now

    def take(self) -> float:
        """Return the usual seconds of the steps since the last call; waits for the device."""
        usual = statistics.median(self._times) if self._times else 0.0
        if len(self._events) == 2:
            self._events[1].synchronize()
            usual += self._events[0].elapsed_time(self._events[1]) / 1000
        self._times.clear()
        self._events.clear()
        return usual


@dataclass(frozen=True)
class Finding:
    """A suspicion about some ranks, and its reason; what follows from it is up to the settings."""

    kind: Literal["corruption", "straggler"]
    ranks: tuple[int, ...]
    why: str


def odd_replicas(hashes: Sequence[int]) -> Finding | None:
    """Compare the hashes of replicas that must be equal, by rank; name those that differ from the majority.

    Without a majority (two ranks that differ, say) all of them are named.
    """
    counts = Counter(hashes).most_common()
    if len(counts) == 1:
        return None
    (value, most), total = counts[0], len(hashes)
    if 2 * most > total:
        odd = tuple(rank for rank, fingerprint in enumerate(hashes) if fingerprint != value)
        return Finding("corruption", odd, f"the weights of {_named(odd)} differ from those of the {most} other ranks")
    every = tuple(range(total))
    return Finding("corruption", every, f"the weights of {_named(every)} differ, and no majority agrees")


def slow_ranks(seconds: Sequence[float], factor: float) -> Finding | None:
    """Compare each rank's own time per step; name those that take more than `factor` times the median of the others."""
    slow = []
    for rank, duration in enumerate(seconds):
        others = [other_duration for other, other_duration in enumerate(seconds) if other != rank]
        if others and duration > factor * statistics.median(others):
            slow.append(rank)
    if not slow:
        return None
    usual = statistics.median(other_duration for rank, other_duration in enumerate(seconds) if rank not in slow)
    times = ", ".join(f"{seconds[rank] * 1000:.3g} ms" for rank in slow)
    verb = "takes" if len(slow) == 1 else "take"
    why = f"{_named(tuple(slow))} {verb} {times} per step without waiting, the others {usual * 1000:.3g} ms"
    return Finding("straggler", tuple(slow), why)


def _named(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
