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
    #   Hint 1: which tensors does a model hold beside its weights? Look at a BatchNorm layer.
    #   Hint 2: dist.broadcast(tensor, src=0) is called by all ranks, in the same order, and writes into the tensor.
    #   model.parameters() and model.buffers() list the tensors; state_dict() leaves out buffers with
    #   persistent=False.
    #   Hint 3: go over the parameters, then over the buffers, on every rank alike. For each, broadcast the tensor
    #   without its gradient history (detach() shares the memory), from rank 0.
    raise NotImplementedError("broadcast_model")


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks.

    On some rank a parameter may have no gradient (`param.grad is None`), because the data of that rank did not use it.
    It counts as zeros there: the sum is still divided by the number of ranks, and afterwards all ranks hold the same
    gradient. Parameters with requires_grad=False are left alone and cause no communication.
    """
    # TODO average-gradients: sum each gradient over the ranks and divide it.
    #   Hint 1: all ranks have to make the same calls. What happens if rank 1 skips a parameter, and the others do
    #   not?
    #   Hint 2: dist.all_reduce(tensor) sums in place on all ranks. A rank that has no gradient brings zeros:
    #   torch.zeros_like(param). requires_grad is equal on all ranks; `grad is None` is not.
    #   Hint 3: for each parameter that requires a gradient: if its grad is None, set it to zeros. All-reduce the
    #   grad. Divide it in place by the number of ranks.
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
    #   Hint 1: the mean of the means is not the mean if the parts have different lengths. With which factor does each
    #   rank's mean loss have to be multiplied?
    #   Hint 2: all-reduce the number of samples of the step first. average_gradients divides by the number of ranks,
    #   so the factor of a rank is samples of this rank / samples of all ranks * number of ranks. An empty part has no
    #   loss, but its rank must take part in every collective call.
    #   Hint 3: broadcast_model once. For each pair: all-reduce the count; clear the gradients; if the part is not
    #   empty, multiply the loss by the factor, go backward, and keep loss * samples; average_gradients;
    #   optimizer.step(); all-reduce the kept sum and divide it by the count for the list of losses.
    raise NotImplementedError("train")


def root_all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks: rank 0 collects, adds, and sends the sum back.

    Uses send and recv (or isend and irecv) only. Each other rank sends its tensor once and receives once:
    2 * (world - 1) messages in all, and rank 0 handles every one of them.
    """
    # TODO root-all-reduce: let rank 0 collect all tensors, add them and send the sum to the others.
    #   Hint 1: what does rank 0 do, and what do all the others do? Write the two sides one below the other: each send
    #   needs its recv.
    #   Hint 2: rank 0: for each other rank dist.recv into a second tensor of the same shape, and add it to the own
    #   one. Then dist.send the sum to each. The others: dist.send, then dist.recv.
    #   Hint 3: rank 0 receives from 1, 2, ... in turn into a buffer made with torch.empty_like and adds in place;
    #   after the last one it sends its tensor to 1, 2, ... in turn. Each other rank sends its tensor to 0 and then
    #   receives into the same tensor.
    raise NotImplementedError("root_all_reduce")


def exchange_all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks: every rank sends its tensor to every other rank and adds.

    Uses isend and irecv (or send and recv) only. Each rank sends world - 1 messages: world * (world - 1) in all, and
    all of them can travel at the same time. The result has the same bits on all ranks: floating-point addition depends
    on the order, so every rank adds in the order of the ranks 0, 1, 2, ...
    """
    # TODO exchange-all-reduce: send the tensor to all other ranks, receive theirs, and add in the order of the ranks.
    #   Hint 1: if every rank first sends and then receives, and a send waits for its receiver: which rank moves
    #   first?
    #   Hint 2: dist.isend and dist.irecv return at once with a request; wait() on every request before you use or
    #   change the tensors. Each received tensor needs a buffer of its own.
    #   Hint 3: make one buffer per rank and copy the own tensor into the own buffer. Start an isend of it to each
    #   other rank and an irecv from each into its buffer. Wait for all. Set the tensor to zero and add the buffers 0,
    #   1, 2, ...
    raise NotImplementedError("exchange_all_reduce")


def tree_all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks along a binary tree: up to rank 0, then down again.

    Uses send and recv (or isend and irecv) only. 2 * (world - 1) messages in all, as with the root, but no rank sends
    more than ceil(log2(world)) messages or receives more: with 8 ranks, rank 0 receives 3 times and sends 3 times.
    Works for every number of ranks, also 3, 5, 6 or 7.
    """
    # TODO tree-all-reduce: add in pairs towards rank 0, then send the sum back along the same pairs.
    #   Hint 1: draw 8 ranks. At distance 1 the odd ranks send to their left neighbours and are finished. Who is left,
    #   and at which distance are their partners? Then take away ranks 5 to 7.
    #   Hint 2: with distance = 1, 2, 4, ... < world: rank % (2 * distance) == distance means that this rank sends to
    #   rank - distance. Otherwise it receives from rank + distance, if that rank exists. A rank that has sent stops
    #   climbing.
    #   Hint 3: collect the children (ranks it receives from, by distance) and the parent (rank it sends to; rank 0
    #   has none). Receive from each child in order and add; send to the parent; receive the sum from the parent; send
    #   it to the children, the most distant first.
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
    #   Hint 1: a rank that comes early waits inside all_reduce for the late ones. How do you start the clock at the
    #   same moment on all ranks?
    #   Hint 2: dist.barrier() after prepare, then time.perf_counter() round the call. Drop the first sample of each
    #   size. Per call take the maximum over ranks (all_reduce with ReduceOp.MAX), per size the median over the calls.
    #   Hint 3: for each size repeats + 1 times: prepare, barrier, clock, all_reduce, clock. All-reduce the samples
    #   without the first with MAX and take their median. statistics.linear_regression(sizes, medians) returns slope
    #   and intercept: beta and alpha. sizes are bytes, not elements.
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
