"""Train with data parallelism: equal weights, averaged gradients, the loop, three all-reduces and their cost.

Run it: python trainer.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


def broadcast_model(model: nn.Module) -> None:
    """Give all ranks the weights and buffers of rank 0.

    Afterwards every parameter (frozen ones too) and every buffer (integers such as num_batches_tracked, and buffers
    that are not part of the state_dict) has the value of rank 0 on all ranks. The tensors stay the same objects: an
    optimizer that was made before still updates them. Nothing changes on rank 0, no gradient is recorded.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks.

    On some rank a parameter may have no gradient (`param.grad is None`), because the data of that rank did not use it.
    It counts as zeros there: the sum is still divided by the number of ranks, and afterwards all ranks hold the same
    gradient. Parameters with requires_grad=False are left alone and cause no communication.
    """
    world = dist.get_world_size()
    for param in model.parameters():
        if not param.requires_grad:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad)
        param.grad /= world


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> list[float]:
    """Train on all ranks together and return the loss of each step.

    `batches` are the (inputs, targets) of this rank, one pair per step; the number of steps is the same on all ranks.
    The parts of a step may have different lengths on the ranks, and may be empty (shape (0, features)).
    `loss_function(outputs, targets)` is the mean over the samples; for an empty batch it is nan.

    The ranks may come with different weights: the ones of rank 0 count. After each step the weights are equal on all
    ranks, and the same as those of one process that trains on all samples of the step as one batch. The returned
    losses are the means over all samples of a step, taken before its update, and the same on all ranks.
    """
    broadcast_model(model)
    losses = []
    for inputs, targets in batches:
        total = torch.tensor([len(inputs)], dtype=torch.float64)
        dist.all_reduce(total)
        optimizer.zero_grad()
        summed = torch.zeros(1, dtype=torch.float64)
        if len(inputs):
            loss = loss_function(model(inputs), targets)
            # average_gradients divides by the number of ranks; this rank has len(inputs) of `total` samples.
            share = len(inputs) / total.item()
            (loss * share * dist.get_world_size()).backward()
            summed += loss.item() * len(inputs)
        average_gradients(model)
        optimizer.step()
        dist.all_reduce(summed)
        losses.append((summed / total).item())
    return losses


def root_all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks: rank 0 collects, adds, and sends the sum back.

    Uses send and recv (or isend and irecv) only. Each other rank sends its tensor once and receives once:
    2 * (world - 1) messages in all, and rank 0 handles every one of them.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        received = torch.empty_like(tensor)
        for other in range(1, world):
            dist.recv(received, src=other)
            tensor += received
        for other in range(1, world):
            dist.send(tensor, dst=other)
    else:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)


def exchange_all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks: every rank sends its tensor to every other rank and adds.

    Uses isend and irecv (or send and recv) only. Each rank sends world - 1 messages: world * (world - 1) in all, and
    all of them can travel at the same time. The result has the same bits on all ranks: floating-point addition depends
    on the order, so every rank adds in the order of the ranks 0, 1, 2, ...
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(tensor) for _ in range(world)]
    parts[rank].copy_(tensor)
    others = [other for other in range(world) if other != rank]
    requests = [dist.isend(parts[rank], dst=other) for other in others]
    requests += [dist.irecv(parts[other], src=other) for other in others]
    for request in requests:
        request.wait()
    tensor.zero_()
    for part in parts:
        tensor += part


def tree_all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks along a binary tree: up to rank 0, then down again.

    Uses send and recv (or isend and irecv) only. 2 * (world - 1) messages in all, as with the root, but no rank sends
    more than ceil(log2(world)) messages or receives more: with 8 ranks, rank 0 receives 3 times and sends 3 times.
    Works for every number of ranks, also 3, 5, 6 or 7.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    children = []
    parent = None
    distance = 1
    # With 5 ranks: distance 1: 1 -> 0, 3 -> 2 (4 has no partner); distance 2: 2 -> 0; distance 4: 4 -> 0.
    while distance < world and parent is None:
        if rank % (2 * distance) == distance:
            parent = rank - distance
        elif rank + distance < world:
            children.append(rank + distance)
        distance *= 2
    for child in children:
        dist.recv(received, src=child)
        tensor += received
    if parent is not None:
        dist.send(tensor, dst=parent)
        dist.recv(tensor, src=parent)
    for child in reversed(children):
        dist.send(tensor, dst=child)


@dataclass(frozen=True)
class Cost:
    """The cost model of a collective: seconds(n) = alpha + beta * n for n bytes."""

    alpha: float
    """Seconds of a call without payload: the latency."""
    beta: float
    """Seconds per byte: 1 / bandwidth."""

    def seconds(self, size: int) -> float:
        """Predict the seconds of a call with `size` bytes."""
        return self.alpha + self.beta * size


def measure_all_reduce(
    all_reduce: Callable[[Tensor], None],
    prepare: Callable[[int], Tensor],
    sizes: Sequence[int],
    *,
    repeats: int = 5,
) -> Cost:
    """Measure `all_reduce` for each size in `sizes` (bytes) and return the fitted cost, the same on all ranks.

    `prepare(size)` returns a float32 tensor of `size` bytes to reduce. It takes a different time on each rank, as
    computing gradients does; that time is not part of the cost. The first call with a size opens connections
    and buffers and is slow: its time does not count. Each size is reduced at most repeats + 2 times, this call included
    (repeats + 1 are enough). Of the other calls, one
    may be slow because the machine did something else: it must not move the result much.
    The seconds of one call are those of its slowest rank.
    """
    seconds = []
    for size in sizes:
        samples = []
        for _ in range(repeats + 1):
            tensor = prepare(size)
            dist.barrier()
            start = time.perf_counter()
            all_reduce(tensor)
            samples.append(time.perf_counter() - start)
        slowest = torch.tensor(samples[1:], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(statistics.median(slowest.tolist()))
    slope, intercept = statistics.linear_regression(sizes, seconds)
    return Cost(alpha=intercept, beta=slope)


def show(rank: int, world: int) -> None:
    """Train a small model on `world` ranks, compare the all-reduces and print what rank 0 sees."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.linspace(-1, 1, 40).reshape(10, 4)
    targets = inputs.sum(dim=1, keepdim=True)
    parts = [(inputs[rank::world], targets[rank::world])] * 20
    losses = train(model, optimizer, nn.functional.mse_loss, parts)
    sums = []
    for reduce in (root_all_reduce, exchange_all_reduce, tree_all_reduce):
        tensor = torch.full((2,), float(rank + 1))
        reduce(tensor)
        sums.append(tensor.tolist())
    cost = measure_all_reduce(tree_all_reduce, lambda size: torch.ones(size // 4), [4_000, 400_000, 4_000_000])
    if rank == 0:
        print(f"loss fell from {losses[0]:.2f} to below {losses[0] / 10:.2f}:", losses[-1] < losses[0] / 10)
        print("root, exchange, tree:", *sums)
        print("the tree needs less than 1 s for 10 MB:", cost.seconds(10_000_000) < 1)


def run_rank(rank: int, world: int, store: str) -> None:
    """Join the group of `world` ranks and run `show`."""
    dist.init_process_group("gloo", init_method=f"file://{store}/group", rank=rank, world_size=world)
    show(rank, world)
    dist.destroy_process_group()


def main() -> None:
    """Start 3 ranks on this machine."""
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.spawn(run_rank, args=(3, store), nprocs=3)


if __name__ == "__main__":
    main()
