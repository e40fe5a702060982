"""Phase 1, part 2: train with data parallelism, reduce over ranks in three ways and measure the cost.

Write the seven exercises, each marked with TODO. See guidelines.md. Check one: phalanx learn check broadcast-model.
The default process group exists when your functions are called: dist.get_rank() and dist.get_world_size() answer.
Run this file (python template_trainer.py) to see 3 ranks use your functions.
"""

from __future__ import annotations

import tempfile
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
    # TODO broadcast-model: send every tensor of rank 0's model to all ranks.
    #   Hints, one at a time: phalanx learn hint broadcast-model
    raise NotImplementedError("broadcast_model")


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks.

    On some rank a parameter may have no gradient (`param.grad is None`), because the data of that rank did not use it.
    It counts as zeros there: the sum is still divided by the number of ranks, and afterwards all ranks hold the same
    gradient. Parameters with requires_grad=False are left alone and cause no communication.
    """
    # TODO average-gradients: sum each gradient over the ranks and divide it.
    #   Hints, one at a time: phalanx learn hint average-gradients
    raise NotImplementedError("average_gradients")


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
    # TODO synchronous-loop: write the loop: equal weights first, then forward, backward, average, update for each
    # batch.
    #   Hints, one at a time: phalanx learn hint synchronous-loop
    raise NotImplementedError("train")


def root_all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks: rank 0 collects, adds, and sends the sum back.

    Uses send and recv (or isend and irecv) only. Each other rank sends its tensor once and receives once:
    2 * (world - 1) messages in all, and rank 0 handles every one of them.
    """
    # TODO root-all-reduce: let rank 0 collect all tensors, add them and send the sum to the others.
    #   Hints, one at a time: phalanx learn hint root-all-reduce
    raise NotImplementedError("root_all_reduce")


def exchange_all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks: every rank sends its tensor to every other rank and adds.

    Uses isend and irecv (or send and recv) only. Each rank sends world - 1 messages: world * (world - 1) in all, and
    all of them can travel at the same time. The result has the same bits on all ranks: floating-point addition depends
    on the order, so every rank adds in the order of the ranks 0, 1, 2, ...
    """
    # TODO exchange-all-reduce: send the tensor to all other ranks, receive theirs, and add in the order of the ranks.
    #   Hints, one at a time: phalanx learn hint exchange-all-reduce
    raise NotImplementedError("exchange_all_reduce")


def tree_all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks along a binary tree: up to rank 0, then down again.

    Uses send and recv (or isend and irecv) only. 2 * (world - 1) messages in all, as with the root, but no rank sends
    more than ceil(log2(world)) messages or receives more: with 8 ranks, rank 0 receives 3 times and sends 3 times.
    Works for every number of ranks, also 3, 5, 6 or 7.
    """
    # TODO tree-all-reduce: add in pairs towards rank 0, then send the sum back along the same pairs.
    #   Hints, one at a time: phalanx learn hint tree-all-reduce
    raise NotImplementedError("tree_all_reduce")


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
    # TODO measure-all-reduce: time the calls, remove what does not belong to them, and fit a line.
    #   Hints, one at a time: phalanx learn hint measure-all-reduce
    raise NotImplementedError("measure_all_reduce")


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
    try:
        show(rank, world)
    except NotImplementedError as missing:
        print(f"rank {rank}: {missing} is not written yet")
    dist.destroy_process_group()


def main() -> None:
    """Start 3 ranks on this machine."""
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.spawn(run_rank, args=(3, store), nprocs=3)


if __name__ == "__main__":
    main()
