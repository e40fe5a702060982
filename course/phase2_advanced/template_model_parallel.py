"""Exercises: a model split over ranks, a pipeline, tensor parallelism. Read guidelines.md first.

The default process group (gloo) exists when your code runs: use dist.get_rank(), dist.send(), dist.recv(), ...
`python template_model_parallel.py` runs what you have written on two ranks; `phalanx learn check NAME` grades it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

Action = tuple[str, int]
"""("F", i): run forward of micro-batch i; ("B", i): run backward of micro-batch i."""


def receive(shape: Sequence[int], source: int) -> Tensor:
    """Return a float32 tensor of this shape from another rank."""
    tensor = torch.empty(*shape)
    dist.recv(tensor, source)
    return tensor


class SplitModel:
    """The layers of this rank, and the exchange with the ranks before and after it.

    The whole model is `count` layers, one after the other. Each rank holds neighbouring layers: rank 0 the first ones,
    the last rank the last ones, all in order. The numbers of layers of two ranks differ by at most one; `count` is not
    always a multiple of the number of ranks. `self.layers` holds the layers of this rank (an nn.Sequential).

    build(number): makes layer `number`. Call it only for the layers of this rank: the others have no place in memory.
    """

    def __init__(self, build: Callable[[int], nn.Module], count: int) -> None:
        # TODO split-model: build this rank's layers here, and write `step` below.
        #   Hints, one at a time: phalanx learn hint split-model
        raise NotImplementedError("SplitModel")

    def step(self, inputs: Tensor | None, targets: Tensor | None, shape: Sequence[int]) -> Tensor | None:
        """Run forward and backward of one batch over all ranks.

        inputs: the batch on rank 0; do not read it on other ranks. targets: on the last rank; do not read it elsewhere.
        shape: the shape of every activation between two layers (and of inputs and targets). All are float32.
        Afterwards each parameter's .grad has grown by the gradient of mse_loss(model(inputs), targets), as if one
        process had run the whole model. Returns the loss (detached) on the last rank, None on the others.
        """
        raise NotImplementedError("SplitModel.step")


def pipeline_schedule(kind: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the order of work of one stage: each ("F", i) and each ("B", i) once, i from 0 to micro_batches - 1.

    kind "gpipe": all forwards, then all backwards.
    kind "1f1b": as soon as a stage can run a backward, it alternates one forward and one backward. Stage s never keeps
    more than stages - s micro-batches alive (forward done, backward not done), and the whole pipeline takes no longer
    than with gpipe. Forwards and backwards each run in the order of the micro-batches.
    Any other kind: ValueError. micro_batches may be smaller than stages.
    """
    # TODO pipeline-schedule: return the list of actions of this stage.
    #   Hints, one at a time: phalanx learn hint pipeline-schedule
    raise NotImplementedError("pipeline_schedule")


def run_pipeline(
    stage: nn.Module,
    schedule: Sequence[Action],
    inputs: Sequence[Tensor] | None,
    targets: Sequence[Tensor] | None,
    shape: Sequence[int],
) -> Tensor | None:
    """Run a schedule on this rank's stage, in its order and with real messages.

    inputs: the micro-batches on rank 0, targets: those on the last rank; do not read them elsewhere.
    shape: the shape of one micro-batch's activations between two stages, float32.
    Afterwards each parameter's .grad has grown by the gradient of the mean over the micro-batches of
    mse_loss(model(inputs[i]), targets[i]). Returns this mean (detached) on the last rank, None on the others.
    An activation is kept from its forward to its backward, not longer. Stages work at the same time.
    """
    # TODO run-pipeline: execute the actions one after the other.
    #   Hints, one at a time: phalanx learn hint run-pipeline
    raise NotImplementedError("run_pipeline")


class ColumnRowLinear(nn.Module):
    """Two linear layers with a GELU between them, split over the ranks along the hidden features.

    Output: second(gelu(first(inputs))), whole on every rank. The number of hidden features is a multiple of the ranks;
    rank r holds the r-th block of neighbouring hidden features, as its own parameters (copies, not views):
        column_weight: the rows of first.weight that belong to its block    (hidden / ranks, inputs)
        column_bias:   the same part of first.bias                          (hidden / ranks)
        row_weight:    the columns of second.weight for its block           (outputs, hidden / ranks)
        row_bias:      the whole second.bias                                (outputs)
    first, second: the whole layers, equal on all ranks.
    """

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        # TODO column-row-linear: make the four parameters here, and write `forward` below.
        #   Hints, one at a time: phalanx learn hint column-row-linear
        raise NotImplementedError("ColumnRowLinear")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the whole output; one all_reduce here and one in backward, no other message.

        inputs: (batch, in_features), the same on every rank. After backward, inputs.grad and the gradients of the four
        parameters equal those of the whole layers (their slices).
        """
        raise NotImplementedError("ColumnRowLinear.forward")


def build_layer(number: int) -> nn.Module:
    """Return layer `number` of the example model; the same weights on every rank."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def show_split() -> str:
    """Split five layers and run one batch."""
    torch.manual_seed(99)
    inputs, targets = torch.randn(8, 8), torch.randn(8, 8)
    model = SplitModel(build_layer, 5)
    return f"{len(model.layers)} of 5 layers, loss {model.step(inputs, targets, inputs.shape)}"


def show_pipeline() -> str:
    """Run four micro-batches through one layer per rank."""
    torch.manual_seed(99)
    inputs, targets = torch.randn(8, 8), torch.randn(8, 8)
    schedule = pipeline_schedule("1f1b", dist.get_rank(), dist.get_world_size(), 4)
    loss = run_pipeline(build_layer(dist.get_rank()), schedule, inputs.split(2), targets.split(2), (2, 8))
    return f"{' '.join(f'{kind}{number}' for kind, number in schedule)}, loss {loss}"


def show_tensor_parallel() -> str:
    """Split sixteen hidden features."""
    torch.manual_seed(99)
    pair = ColumnRowLinear(nn.Linear(8, 16), nn.Linear(16, 8))
    return f"{pair.column_weight.shape[0]} of 16 hidden features, output {pair(torch.ones(1, 8)).sum():.4f}"


def show(rank: int, world: int, meeting: str) -> None:
    """Run what is written, on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    for part in (show_split, show_pipeline, show_tensor_parallel):
        try:
            print(f"rank {rank}: {part()}", flush=True)
        except NotImplementedError as missing:
            print(f"rank {rank}: {missing} is not written yet", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(show, args=(2, f"{folder}/meeting"), nprocs=2)
