"""A parameter server in three kinds, and a plan for several servers: answers for template_parameter_server.py."""

from __future__ import annotations

import itertools
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

SERVER = 0
Gradient = Callable[[Tensor, int], Tensor]
"""gradient(weights, step): the gradient of this worker's data at these weights."""


def work(weights: Tensor, gradient: Gradient, steps: int) -> None:
    """Run one worker: pull, then for each step push a gradient and pull the weights that follow."""
    dist.recv(weights, SERVER)
    for step in range(steps):
        dist.send(gradient(weights, step), SERVER)
        dist.recv(weights, SERVER)


def train_sync(weights: Tensor, gradient: Gradient, steps: int, rate: float) -> None:
    """Train in lockstep: one update for each round of pushes, by their average."""
    if dist.get_rank() != SERVER:
        return work(weights, gradient, steps)
    workers = range(1, dist.get_world_size())
    for worker in workers:
        dist.send(weights, worker)
    incoming = torch.empty_like(weights)
    for _ in range(steps):
        total = torch.zeros_like(weights)
        for worker in workers:
            dist.recv(incoming, worker)
            total += incoming
        weights -= rate * total / len(workers)
        for worker in workers:
            dist.send(weights, worker)
    return None


def train_async(weights: Tensor, gradient: Gradient, steps: int, rate: float) -> list[tuple[int, int]]:
    """Apply each push when it comes. Return (worker, staleness) for each update on the server, [] on a worker."""
    if dist.get_rank() != SERVER:
        work(weights, gradient, steps)
        return []
    workers = range(1, dist.get_world_size())
    for worker in workers:
        dist.send(weights, worker)
    log: list[tuple[int, int]] = []
    version_of = dict.fromkeys(workers, 0)
    incoming = torch.empty_like(weights)
    while len(log) < steps * len(workers):
        sender = dist.recv(incoming)
        log.append((sender, len(log) - version_of[sender]))
        weights -= rate * incoming
        version_of[sender] = len(log)
        dist.send(weights, sender)
    return log


def receive_all(worker: int, like: Tensor, steps: int, pushes: queue.Queue[tuple[int, Tensor]]) -> None:
    """Put each push of one worker into the queue; runs in a thread, so a silent worker blocks only this thread."""
    for _ in range(steps):
        incoming = torch.empty_like(like)
        dist.recv(incoming, worker)
        pushes.put((worker, incoming))


class BoundedServer:
    """The server of train_bounded: how far each worker is, and which replies it holds back."""

    def __init__(self, weights: Tensor, steps: int, rate: float, bound: int, patience: float) -> None:
        self.weights, self.steps, self.rate, self.bound, self.patience = weights, steps, rate, bound, patience
        self.done = dict.fromkeys(range(1, dist.get_world_size()), 0)  # steps of each living worker
        self.held: set[int] = set()
        self.heard: dict[int, float] = {}
        self.pushes: queue.Queue[tuple[int, Tensor]] = queue.Queue()
        self.lost: list[int] = []

    def reply(self, worker: int) -> None:
        """Send the weights; from now on the worker has `patience` seconds for its next push."""
        dist.send(self.weights, worker)
        self.heard[worker] = time.monotonic()

    def release(self) -> None:
        """Reply to the held workers that are at most `bound` steps ahead of the slowest living one."""
        slowest = min(self.done.values(), default=0)
        for worker in sorted(self.held):
            if self.done[worker] - slowest <= self.bound:
                self.held.discard(worker)
                self.reply(worker)

    def drop_silent(self) -> None:
        """Give up the workers whose push is overdue."""
        for worker, steps in list(self.done.items()):
            waiting = steps < self.steps and worker not in self.held
            if waiting and time.monotonic() - self.heard[worker] > self.patience:
                self.lost.append(worker)
                del self.done[worker]

    def run(self) -> list[int]:
        """Serve until every living worker has all its steps and its last reply."""
        for worker in self.done:
            self.reply(worker)
            arguments = (worker, self.weights, self.steps, self.pushes)
            threading.Thread(target=receive_all, args=arguments, daemon=True).start()
        while self.held or any(steps < self.steps for steps in self.done.values()):
            try:
                worker, gradient = self.pushes.get(timeout=self.patience / 10)
            except queue.Empty:
                worker = SERVER
            if worker in self.done:
                self.weights -= self.rate * gradient
                self.done[worker] += 1
                self.held.add(worker)
            self.drop_silent()
            self.release()
        return self.lost


def train_bounded(
    weights: Tensor, gradient: Gradient, steps: int, rate: float, bound: int, patience: float
) -> list[int]:
    """Train asynchronously with a limit on the lead of a worker. Return the workers given up, [] on a worker."""
    if dist.get_rank() == SERVER:
        return BoundedServer(weights, steps, rate, bound, patience).run()
    work(weights, gradient, steps)
    return []


def balance_shards(tensors: Mapping[str, Tensor], servers: int, largest: int) -> list[list[tuple[str, int, int]]]:
    """Return for each server its pieces (name, first element, end): biggest piece first, to the least loaded server."""
    pieces = []
    for name, tensor in tensors.items():
        count = -(-tensor.numel() // max(1, largest // tensor.element_size()))
        bounds = [tensor.numel() * part // count for part in range(count + 1)]
        for start, end in itertools.pairwise(bounds):
            pieces.append(((end - start) * tensor.element_size(), name, start, end))
    plan: list[list[tuple[str, int, int]]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for size, name, start, end in sorted(pieces, key=lambda piece: (-piece[0], piece[1:])):
        server = loads.index(min(loads))
        plan[server].append((name, start, end))
        loads[server] += size
    return plan


def plan_lines(plan: Sequence[Sequence[tuple[str, int, int]]]) -> list[str]:
    """Return one line per server."""
    return [f"server {server} holds {pieces}" for server, pieces in enumerate(plan)]


def show(rank: int, world: int, meeting: str) -> None:
    """Train on one rank with each kind of server and print what the server knows."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    goal = torch.full((4,), float(rank))

    def gradient(weights: Tensor, step: int) -> Tensor:
        time.sleep(0.1 if rank == 2 else 0.0)
        return weights - goal

    weights = torch.zeros(4)
    train_sync(weights, gradient, steps=5, rate=0.5)
    lines = [f"sync: the goals are 1 and 2, the weights {weights.tolist()}"]
    weights = torch.zeros(4)
    log = train_async(weights, gradient, steps=3, rate=0.5)
    lines.append(f"async: updates (worker, staleness) {log}")
    weights = torch.zeros(4)
    lost = train_bounded(weights, gradient, steps=3, rate=0.5, bound=1, patience=5.0)
    lines.append(f"bounded: workers given up {lost}")
    lines += plan_lines(balance_shards({"a": torch.zeros(10), "b": torch.zeros(4), "c": torch.zeros(3)}, 2, 20))
    if rank == 0:
        print("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start a server and two workers."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(show, args=(3, f"{folder}/meeting"), nprocs=3)


if __name__ == "__main__":
    main()
