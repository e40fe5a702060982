"""Exercises: a parameter server in three kinds, and a plan for several servers. Read guidelines.md first.

Rank 0 is the server, all other ranks are workers. The default process group (gloo) exists when your code runs.
`python template_parameter_server.py` runs what you have written on three ranks; `phalanx learn check NAME` grades it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

SERVER = 0
Gradient = Callable[[Tensor, int], Tensor]
"""gradient(weights, step): the gradient of this worker's data at these weights, a new tensor. Never on the server."""


def train_sync(weights: Tensor, gradient: Gradient, steps: int, rate: float) -> None:
    """Train in lockstep, as one process with all data would: weights -= rate * (mean of the workers' gradients).

    Called on all ranks. weights: 1-D; before the call only the server's values count (a worker's tensor may hold
    anything), afterwards every rank's tensor holds the final weights, changed in place. Step s: each worker pushes
    gradient(weights, s); when all have come, the server updates and each worker pulls. Workers talk only to the
    server: one pull before the first step, then one push and one pull per step. Only send, recv, isend, irecv.
    """
    # TODO server-sync: write the server's half and the worker's half.
    #   Hints, one at a time: phalanx learn hint server-sync
    raise NotImplementedError("train_sync")


def train_async(weights: Tensor, gradient: Gradient, steps: int, rate: float) -> list[tuple[int, int]]:
    """Train without lockstep: the server applies each push at once, weights -= rate * gradient, and answers its sender.

    As train_sync, but no worker waits for another one. The server serves until it has `steps` pushes of each worker.
    Returns on the server one pair (worker, staleness) per update, in order; [] on a worker. Staleness: the number of
    updates that the server made between the pull of the weights that this gradient was computed at and this update.
    Example: both workers pull; worker 1 pushes (staleness 0), pulls, pushes (0); worker 2 pushes: its staleness is 2.
    """
    # TODO server-async: write the server's half; the worker's half is that of train_sync.
    #   Hints, one at a time: phalanx learn hint server-async
    raise NotImplementedError("train_async")


def train_bounded(
    weights: Tensor, gradient: Gradient, steps: int, rate: float, bound: int, patience: float
) -> list[int]:
    """Train without lockstep, but with a limit on how far a worker may run ahead, and without waiting for the silent.

    As train_async, with two additions. A worker that is more than `bound` pushes ahead of the slowest worker
    gets no answer until the lead is at most `bound` again. A worker that has pulled and does not push for `patience`
    seconds (it hangs; its process still exists) is given up: it gets no answers any more, counts as slowest no longer,
    and a push that comes from it later is not applied. A worker without an answer is not silent, however long it is
    held back. The server ends when each remaining worker has all its steps and its last answer.
    Returns on the server the workers given up, in order; [] on a worker.
    """
    # TODO bounded-staleness: write the server's half; the worker's half is that of train_sync.
    #   Hints, one at a time: phalanx learn hint bounded-staleness
    raise NotImplementedError("train_bounded")


def balance_shards(tensors: Mapping[str, Tensor], servers: int, largest: int) -> list[list[tuple[str, int, int]]]:
    """Return for each server its pieces of tensors: (name, first element, end), end excluded.

    A tensor of more than `largest` bytes is cut: into the smallest number of pieces of at most `largest` bytes each,
    whose sizes differ by at most one element. Every element lies in exactly one piece. The load of a server is the sum
    of its pieces' bytes (numel * element_size); the largest load is at most 4/3 of the smallest possible one.
    The plan depends on names and sizes alone, not on the order of the mapping: ranks compute it without a message.
    """
    # TODO balance-shards: cut the large tensors, then distribute the pieces.
    #   Hints, one at a time: phalanx learn hint balance-shards
    raise NotImplementedError("balance_shards")


def show(rank: int, world: int, meeting: str) -> None:
    """Run what is written, on one rank: the goal of worker r is r, so the mean of the goals is 1.5."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    settings = {train_sync: (5, 0.5), train_async: (5, 0.5), train_bounded: (5, 0.5, 1, 5.0)}
    for train, arguments in settings.items():
        weights = torch.zeros(2)
        try:
            result = train(weights, lambda weights, step: weights - rank, *arguments)
            print(f"rank {rank}: {train.__name__}: weights {weights.tolist()}, result {result}", flush=True)
        except NotImplementedError as missing:
            print(f"rank {rank}: {missing} is not written yet", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(show, args=(3, f"{folder}/meeting"), nprocs=3)
