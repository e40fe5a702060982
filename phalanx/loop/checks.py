"""Optional checks of ranks that hold replicas: equal weights (`check_replicas_every`), and ranks that are slow."""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from phalanx.checkpoint.group import gather_to_all
from phalanx.data.loader import ShardedLoader
from phalanx.errors import CorruptionError, ReplicaError, StragglerError
from phalanx.loop.formation import Formation
from phalanx.loop.optim import OptimizerSettings
from phalanx.loop.state import shared_state
from phalanx.observe.events import RankSuspected
from phalanx.reliability.findings import Finding, balanced_shares, odd_replicas, slow_ranks

_CHUNK = 1 << 22
_MOST_MORE = 1.25
"""A fast rank gets at most so many times its `batch_size`, for its memory's sake."""
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
    """Runs the checks that the config asks for; all ranks call its methods at the same steps."""

    def __init__(self, formation: Formation, model: nn.Module, emit: Callable[[RankSuspected], None]) -> None:
        config = formation.config
        self._formation = formation
        self._model = model
        self._emit = emit
        self._every = config.check_replicas_every
        self._on_corruption, self._on_straggler = config.on_corruption, config.on_straggler
        self._factor, self._window = config.straggler_factor, config.straggler_steps
        self._shares: tuple[int, ...] | None = None
        """How many samples of a micro-step each rank should take from now on."""
        several = formation.world_size > 1
        self.is_on = several and (self._every is not None or self._factor is not None)
        self._checked = -1
        self._handles: list[Any] = []
        self._pace = OwnTime(formation.device) if several and self._factor is not None else None
        if self._pace is not None:
            if formation.world.store is not None:
                formation.world.store.set(f"host/{formation.rank}", socket.gethostname())
            self._handles = [
                model.register_forward_pre_hook(self._pace.forward_begins),
                model.register_forward_hook(self._pace.forward_ends),
            ]

    def close(self) -> None:
        """Remove the hooks from the user's model."""
        for handle in self._handles:
            handle.remove()

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
        if self._every is None or not self.is_on or self._checked == step:
            return
        self._checked = step
        own = hash_of(self._model.parameters(), self._formation.device)
        finding = odd_replicas([int(each) for each in self._gather(own)])
        if finding is None:
            return
        replaces = self._on_corruption == "replace" and len(finding.ranks) < self._formation.world_size
        action = "replace" if replaces else "stop" if self._on_corruption == "replace" else self._on_corruption
        self._report(step, finding, action)
        if action == "stop" or (replaces and self._formation.rank in finding.ranks):
            raise CorruptionError(
                f"silent corruption at step {step}: {finding.why}",
                hint="The last checkpoint was written before. Check the memory of that machine or GPU; with "
                "max_restarts the run goes on from the checkpoint, and on_corruption='warn' only reports.",
            )

    def _compare_times(self, step: int, pace: OwnTime) -> None:
        assert self._factor is not None
        times = [float(each) for each in self._gather(torch.tensor(pace.take(), device=self._formation.device))]
        finding = slow_ranks(times, self._factor)
        if finding is None:
            return
        if self._on_straggler == "rebalance":
            self._balance(times)
        if self._formation.is_main:
            finding = dataclasses.replace(finding, why=f"{finding.why} ({self._hosts(finding.ranks)})")
        self._report(step, finding, self._on_straggler)
        if self._on_straggler == "replace" and self._formation.rank in finding.ranks:
            raise StragglerError(f"too slow at step {step}: {finding.why}")

    def _hosts(self, ranks: Iterable[int]) -> str:
        """Return on which machines ranks are; each wrote it into the store when the checks began."""
        store = self._formation.world.store
        assert store is not None, "several ranks have a store"
        return ", ".join(f"rank {rank} is on {store.get(f'host/{rank}').decode()}" for rank in ranks)

    def rebalance(self, loader: ShardedLoader, say: Callable[[str], None]) -> bool:
        """Give slow ranks fewer samples of the same global batch, where that was found; return whether it changed."""
        shares, self._shares = self._shares, None
        if shares is None:
            return False
        able = loader.rebalance(shares)
        what = f"samples of a micro-step by rank: {', '.join(map(str, shares))}"
        say(what if able else "no rebalancing: only batches of a map-style data set can be cut otherwise")
        return able

    def _balance(self, times: list[float]) -> None:
        layout = self._formation.loaders[0].sharded.layout
        even = (layout.batch_size,) * layout.dp_size
        most = max(layout.batch_size + 1, int(_MOST_MORE * layout.batch_size))
        found = balanced_shares(times, layout.shares or even, most)
        self._shares = found if found != (layout.shares or even) else None

    def _gather(self, value: torch.Tensor) -> list[Any]:
        """Return each rank's value: a sum of vectors in which every rank has set its own place."""
        places = torch.zeros(self._formation.world_size, dtype=value.dtype, device=value.device)
        places[self._formation.rank] = value
        return self._formation.reduce(places, "sum").tolist()

    def _report(self, step: int, finding: Finding, action: str) -> None:
        self._emit(RankSuspected(step, finding.kind, list(finding.ranks), finding.why, action))


def compare_ranks(loop: Any) -> None:
    """Raise where ranks that have formed a new group are not equal, and say in what; all ranks call this."""
    own = _comparable(loop)
    for name, here in own.items():
        everywhere = gather_to_all(here)
        if (odd := next((rank for rank, each in enumerate(everywhere) if each != everywhere[0]), None)) is not None:
            values = f": rank 0 has {everywhere[0]}, rank {odd} {everywhere[odd]}"
            raise ReplicaError(
                f"after the ranks had changed, step {loop.step} left them with different {name}{values}",
                hint="Callbacks must do the same on every rank; what they remember must be in their state_dict(), "
                "which a new rank receives.",
            )


def _comparable(loop: Any) -> dict[str, Any]:
    """Return what all ranks must have equal: values themselves, of tensors a hash."""
    formation, optimizers = loop.formation, loop.formation.optimizers
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parts: dict[str, Any] = {  # not buffers: statistics of BatchNorm are those of each rank's own batches
        "learning rates": [float(group["lr"]) for group in groups],
        "optimizer settings": [{name: group.get(name) for name in OptimizerSettings.NAMES} for group in groups],
        "states of schedules, loss scale or data": shared_state(formation),
    }
    strategy = formation.strategy
    if not (strategy.shards or strategy.local_steps or strategy.owns_step) and strategy.in_lockstep:
        states = [held for optimizer in optimizers for held in optimizer.state.values()]
        moments = [each for held in states for each in held.values() if isinstance(each, torch.Tensor)]
        average = {} if formation.average is None else formation.average.parameters()
        parts["weights"] = int(hash_of(loop.model.parameters(), formation.device))
        parts["states of the optimizer"] = int(
            hash_of((each.to(formation.device) for each in moments), formation.device)
        )
        parts["averaged weights"] = int(hash_of(average.values(), formation.device))
    return parts


class OwnTime:
    """A rank's own time per step: from the end of a step to the end of the next forward pass, without collectives.

    What follows, the backward pass, waits for the slowest rank and is equally long on all of them. On CUDA the forward
    pass of one step is timed by events, which cost nothing until they are read.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._ended: float | None = None
        self._times: list[float] = []
        self._events: list[Any] = []

    def forward_begins(self, *_: Any) -> None:
        """Note the begin of a forward pass."""
        if self._on_cuda and not self._events:
            self._events = [_recorded()]

    def forward_ends(self, *_: Any) -> None:
        """Note its end, and the time since the last step, once per step."""
        if self._ended is not None:
            self._times.append(time.perf_counter() - self._ended)
            self._ended = None
        if len(self._events) == 1:
            self._events.append(_recorded())

    def step_ends(self) -> None:
        """Note the end of a step."""
        self._ended = time.perf_counter()

    def take(self) -> float:
        """Return the usual seconds of the steps since the last call; waits for the device."""
        usual = statistics.median(self._times) if self._times else 0.0
        if len(self._events) == 2:
            self._events[1].synchronize()
            usual += self._events[0].elapsed_time(self._events[1]) / 1000
        self._times.clear()
        self._events.clear()
        return usual


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
