"""Checkpoints, complete state, failure detection, recovery, elastic training; as a script: of 3 ranks one dies."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import Store

Ranks = Sequence[BaseProcess]
Clock = Callable[[], float]
Sleep = Callable[[float], None]
PATIENCE = 3  # failures in a row from one checkpoint, after which another restart has no use


class CheckpointStore:
    """Checkpoints of one run in one folder: each is whole or absent, and a damaged one is found and passed over."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder), keep
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write ``state`` as the checkpoint of ``step``, remove all but the newest ``keep``, return the new file."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        payload = buffer.getvalue()
        path = self.folder / f"step-{step:09d}.pt"
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())  # the content is on the disk before the name is
        os.replace(temporary, path)
        for old in self._paths()[: -self.keep]:
            old.unlink()
        return path

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """Return (step, state) of the newest whole checkpoint; None for an empty folder; all damaged: RuntimeError."""
        paths = self._paths()
        for path in reversed(paths):
            content = path.read_bytes()
            if hashlib.sha256(content[32:]).digest() == content[:32]:
                return int(path.stem.split("-")[1]), torch.load(io.BytesIO(content[32:]), "cpu", weights_only=True)
        if paths:
            raise RuntimeError(f"all {len(paths)} checkpoints in {self.folder} are damaged")
        return None

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))  # nine digits: the order of names is the order of steps


@dataclass
class Training:
    """What belongs to a training; the next batch is the one at ``position`` in the shuffled order of ``epoch``."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    epoch: int = 0
    position: int = 0


class TrainingState:
    """All that a checkpoint must hold so that a training which continues gives the same bits as one never stopped."""

    @staticmethod
    def capture(training: Training) -> dict[str, Any]:
        """Return a snapshot: later steps of the training do not change it."""
        state = {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "scheduler": training.scheduler.state_dict(),
            "data": (training.epoch, training.position),
            "random": (random.getstate(), torch.get_rng_state(), numpy.random.get_state()),
        }
        return copy.deepcopy(state)

    @staticmethod
    def restore(training: Training, state: dict[str, Any]) -> None:
        """Put a training, new or used, into the state of a snapshot, which can be used again."""
        state = copy.deepcopy(state)  # an optimizer keeps the tensors that it gets, and its steps change them
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.scheduler.load_state_dict(state["scheduler"])
        training.epoch, training.position = state["data"]
        python_state, torch_state, numpy_state = state["random"]
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        numpy.random.set_state(numpy_state)


class FailureDetector:
    """Heartbeats in a store: names ranks that are dead (no beat) or hung (beats, but does not get on)."""

    def __init__(
        self, store: Store, rank: int, world: int, dead_after: float, hung_after: float, clock: Clock = time.monotonic
    ) -> None:
        self.store, self.rank, self.world, self.clock = store, rank, world, clock
        self.dead_after, self.hung_after, self.started, self.beats = dead_after, hung_after, clock(), 0
        self.seen: dict[str, tuple[bytes, float]] = {}

    def beat(self) -> None:
        """Show that this rank is alive; a thread calls it every fraction of a second."""
        self.beats += 1
        self.store.set(f"beat/{self.rank}", str(self.beats))

    def progress(self, step: int, waiting: bool) -> None:
        """Show what the training loop does: it computes ``step``, or it waits for the other ranks in a collective."""
        self.store.set(f"progress/{self.rank}", f"{step} {'waiting' if waiting else 'computing'}")

    def failures(self) -> dict[int, str]:
        """Return the ranks that have failed by now, each with "dead" or "hung"; never blocks."""
        found = {}
        for rank in range(self.world):
            _, silent = self._look(f"beat/{rank}")
            doing, unchanged = self._look(f"progress/{rank}")
            if silent > self.dead_after:
                found[rank] = "dead"
            elif unchanged > self.hung_after and not doing.endswith(b"waiting"):
                found[rank] = "hung"
        return found

    def _look(self, key: str) -> tuple[bytes, float]:
        """Return the value of a key and for how long, by the clock of this process, it has not changed."""
        value = self.store.get(key) if self.store.check([key]) else b""
        before, since = self.seen.get(key, (b"", self.started))
        if value != before:
            since = self.clock()
        self.seen[key] = (value, since)
        return value, self.clock() - since


def supervise(
    start: Callable[[int], Ranks], last_step: Callable[[], int], max_restarts: int, backoff: float, sleep: Sleep
) -> int:
    """Run ranks until all of them end well, starting all anew after a failure; return the number of restarts."""
    restarts = failures = 0
    while True:
        before = last_step()
        failure = first_failure(start(restarts), sleep)
        if failure is None:
            return restarts
        failures = 1 if last_step() > before else failures + 1
        if failures == PATIENCE or restarts == max_restarts:
            raise RuntimeError(f"{failure}; restarts: {restarts}, failures since the last checkpoint: {failures}")
        sleep(backoff * 2 ** (failures - 1))
        restarts += 1


def first_failure(ranks: Ranks, sleep: Sleep) -> str | None:
    """Wait until all ranks have ended well (None) or one has failed; then end the others and say which one it was."""
    while not any(codes := [process.exitcode for process in ranks]):
        if None not in codes:
            return None
        sleep(0.05)
    failed = next(rank for rank, code in enumerate(codes) if code)
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join()
    return f"rank {failed} ended with exit code {codes[failed]}"


class ElasticTraining:
    """One epoch on a number of ranks that may change between steps: the global batch and the samples stay the same."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, order: list[int], global_batch: int) -> None:
        self.model, self.optimizer, self.order, self.global_batch = model, optimizer, order, global_batch
        self.position = 0

    def share(self, rank: int, world: int) -> list[int]:
        """Return the samples of this rank in the next global batch; the last batch may be smaller, a share empty."""
        return self.order[self.position : self.position + self.global_batch][rank::world]

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Make one step on the mean squared error of the global batch; ``inputs`` and ``targets`` are this share."""
        total = min(self.global_batch, len(self.order) - self.position)
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - targets).square().mean(1).sum() / total
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.position += total

    def join(self) -> None:
        """Give all ranks the state of rank 0, after a checkpoint was loaded there or ranks have come."""
        states = [(self.model.state_dict(), self.optimizer.state_dict(), self.position)]
        dist.broadcast_object_list(states, src=0)
        self.model.load_state_dict(states[0][0])
        self.optimizer.load_state_dict(states[0][1])
        self.position = states[0][2]


def train_rank(rank: int, world: int, folder: Path, generation: int) -> None:
    """Train one epoch from the last checkpoint on; of the first generation, rank 1 dies at sample 24."""
    dist.init_process_group("gloo", f"file://{folder}/ranks-{generation}", rank=rank, world_size=world)
    torch.manual_seed(0)
    data, model = torch.randn(50, 4), nn.Linear(4, 1)
    training = ElasticTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randperm(50).tolist(), 8)
    checkpoints = CheckpointStore(folder)
    if found := checkpoints.load():
        training.position, state = found
        model.load_state_dict(state)
    training.join()
    while training.position < len(data):
        if world > 2 and rank == 1 and training.position == 24:
            os._exit(9)
        inputs = data[training.share(rank, world)]
        training.step(inputs, inputs.sum(1, keepdim=True))
        if rank == 0:
            checkpoints.save(training.position, model.state_dict())
    dist.destroy_process_group()


def train(checkpoints: CheckpointStore, sizes: Sequence[int]) -> int:
    """Train on as many ranks as ``sizes`` says for each generation; return the number of restarts."""

    def start(generation: int) -> Ranks:
        arguments = (sizes[generation], checkpoints.folder, generation)
        return mp.start_processes(train_rank, arguments, sizes[generation], join=False, start_method="fork").processes

    return supervise(start, lambda: (checkpoints.load() or (0,))[0], max_restarts=3, backoff=0.1, sleep=time.sleep)


if __name__ == "__main__":
    for numbers in ((3, 2), (1,)):  # with a failure, and without
        store = CheckpointStore(Path(tempfile.mkdtemp()))
        restarted = train(store, numbers)
        position, weights = store.load() or (0, {})
        print(f"ranks {numbers}: restarts {restarted}, samples {position}, weights", weights["weight"].numpy().round(4))
