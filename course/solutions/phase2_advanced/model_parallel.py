"""A model split over ranks, a pipeline and tensor parallelism: one right answer for template_model_parallel.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Action = tuple[str, int]
"""("F", i): run forward of micro-batch i; ("B", i): run backward of micro-batch i."""


def receive(shape: Sequence[int], source: int) -> Tensor:
    """Return a float32 tensor of this shape from another rank."""
    tensor = torch.empty(*shape)
    dist.recv(tensor, source)
    return tensor


class SplitModel:
    """The layers of this rank, and the exchange with the ranks before and after it."""

    def __init__(self, build: Callable[[int], nn.Module], count: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        first = count * self.rank // self.world
        end = count * (self.rank + 1) // self.world
        self.layers = nn.Sequential(*(build(number) for number in range(first, end)))

    def step(self, inputs: Tensor | None, targets: Tensor | None, shape: Sequence[int]) -> Tensor | None:
        """Run forward and backward of one batch over all ranks; return the loss on the last rank."""
        is_first, is_last = self.rank == 0, self.rank == self.world - 1
        if not is_first:
            inputs = receive(shape, self.rank - 1).requires_grad_()
        outputs = self.layers(inputs)
        if is_last:
            loss = F.mse_loss(outputs, targets)
            loss.backward()
        else:
            dist.send(outputs.detach(), self.rank + 1)
            outputs.backward(receive(shape, self.rank + 1))
        if not is_first:
            dist.send(inputs.grad, self.rank - 1)
        return loss.detach() if is_last else None


def pipeline_schedule(kind: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the order of work of one stage for "gpipe" or "1f1b"."""
    if kind == "gpipe":
        warm_up = micro_batches
    elif kind == "1f1b":
        warm_up = min(stages - stage - 1, micro_batches)
    else:
        raise ValueError(f"unknown schedule {kind!r}: write 'gpipe' or '1f1b'")
    actions: list[Action] = [("F", number) for number in range(warm_up)]
    for number in range(micro_batches - warm_up):
        actions += [("F", warm_up + number), ("B", number)]
    actions += [("B", number) for number in range(micro_batches - warm_up, micro_batches)]
    return actions


def run_pipeline(
    stage: nn.Module,
    schedule: Sequence[Action],
    inputs: Sequence[Tensor] | None,
    targets: Sequence[Tensor] | None,
    shape: Sequence[int],
) -> Tensor | None:
    """Run a schedule on this rank's stage; return the mean loss of the micro-batches on the last rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    micro_batches = len(schedule) // 2
    alive: dict[int, tuple[Tensor, Tensor]] = {}
    sends: list[dist.Work] = []
    total = torch.zeros(())
    for kind, number in schedule:
        if kind == "F":
            entered = inputs[number] if rank == 0 else receive(shape, rank - 1).requires_grad_()
            left = stage(entered)
            if rank == last:
                left = F.mse_loss(left, targets[number]) / micro_batches
                total += left.detach()
            else:
                sends.append(dist.isend(left.detach(), rank + 1))
            alive[number] = (entered, left)
        else:
            entered, left = alive.pop(number)
            left.backward(None if rank == last else receive(shape, rank + 1))
            if rank > 0:
                sends.append(dist.isend(entered.grad, rank - 1))
    for send in sends:
        send.wait()
    return total if rank == last else None


class EnterSplit(torch.autograd.Function):
    """Forward: the same tensor. Backward: the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor) -> Tensor:
        """Pass the input on."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        """Add the parts: each rank knows only the gradient that came through its slice."""
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class LeaveSplit(torch.autograd.Function):
    """Forward: the sum of the ranks' parts. Backward: the same gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, part: Tensor) -> Tensor:
        """Add the parts."""
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        """Pass the gradient on: it is whole on every rank already."""
        return gradient


class ColumnRowLinear(nn.Module):
    """Two linear layers with a GELU between them; each rank holds one slice of the hidden features."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        width = first.out_features // world
        mine = slice(rank * width, (rank + 1) * width)
        self.column_weight = nn.Parameter(first.weight[mine].detach().clone())
        self.column_bias = nn.Parameter(first.bias[mine].detach().clone())
        self.row_weight = nn.Parameter(second.weight[:, mine].detach().clone())
        self.row_bias = nn.Parameter(second.bias.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the whole output on every rank."""
        hidden = F.gelu(F.linear(EnterSplit.apply(inputs), self.column_weight, self.column_bias))
        part = F.linear(hidden, self.row_weight)
        return LeaveSplit.apply(part) + self.row_bias


def build_layer(number: int) -> nn.Module:
    """Return layer `number` of the example model; the same weights on every rank."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def show(rank: int, world: int, meeting: str) -> None:
    """Run every part on one rank and print what the last rank knows."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.manual_seed(99)
    inputs, targets = torch.randn(8, 8), torch.randn(8, 8)
    model = SplitModel(build_layer, 5)
    loss = model.step(inputs, targets, inputs.shape)
    schedule = pipeline_schedule("1f1b", rank, world, 4)
    mean = run_pipeline(model.layers, schedule, inputs.split(2), targets.split(2), (2, 8))
    pair = ColumnRowLinear(nn.Linear(8, 16), nn.Linear(16, 8))
    output = pair(inputs).sum()
    if rank == world - 1:
        print(f"the last rank holds {len(model.layers)} of 5 layers; loss of the batch {loss:.5f}")
        print(f"its order of work: {' '.join(f'{kind}{number}' for kind, number in schedule)}")
        print(f"loss of the pipeline {mean:.5f}, of 4 micro-batches")
        print(f"it holds {pair.column_weight.shape[0]} of 16 hidden features; sum of the outputs {output:.4f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(show, args=(2, f"{folder}/meeting"), nprocs=2)


if __name__ == "__main__":
    main()
