"""Algorithms to look at: each runs on real ranks and notes its state; the messages are those that were recorded.

A rank's data are powers of two, so that a partial sum says whose parts it holds: 5 = 1 + 4 comes from ranks 0 and 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grader.rank import clock

Cells = list[tuple[str, str]]
"""Text and state of what a rank holds; states: own, part, done, empty."""
_BLOCK_SECONDS = 0.03
"""How long one forward pass of a stage takes; a backward pass takes twice as long."""


@dataclass
class Note:
    """What a rank holds at one moment."""

    at: float
    round: str
    cells: Cells
    doing: str


class Notes:
    """The notes of one rank."""

    def __init__(self) -> None:
        self.all: list[Note] = []

    def add(self, round: str, cells: Cells, doing: str = "") -> None:
        """Note the state now."""
        self.all.append(Note(clock(), round, list(cells), doing))


@dataclass(frozen=True)
class Show:
    """One algorithm: what it is, how many ranks it takes, what each does."""

    title: str
    ranks: int
    run: Callable[[int, int, Notes], None]
    in_rounds: bool
    """Whether frames are rounds that all ranks share, or moments in the order of time."""
    least: int = 2


def whose(total: float, world: int) -> tuple[str, str]:
    """Return whose parts a sum of powers of two holds, as a cell."""
    members = [rank for rank in range(world) if int(total) >> rank & 1]
    state = "done" if len(members) == world else "own" if len(members) == 1 else "part"
    return "+".join(map(str, members)) or "-", state


def send_later(data: Tensor, rank: int) -> dist.Work:
    """Begin to send, and return what waits for the end of it."""
    work = dist.isend(data, rank)
    assert work is not None
    return work


def ring(rank: int, world: int, notes: Notes) -> None:
    """Ring all-reduce: reduce-scatter, then all-gather, one chunk per step to the right neighbour."""
    chunks = torch.full((world, 256), float(2**rank))
    right, left = (rank + 1) % world, (rank - 1) % world

    def cells() -> Cells:
        return [whose(chunk[0].item(), world) for chunk in chunks]

    notes.add("start", cells(), "has its own gradient in every chunk")
    for step in range(2 * (world - 1)):
        reduces = step < world - 1
        give = (rank - step) % world if reduces else (rank + 1 - (step - world + 1)) % world
        take = (give - 1) % world
        received = torch.empty_like(chunks[take])
        sending = send_later(chunks[give].clone(), right)
        dist.recv(received, left)
        sending.wait()
        chunks[take] = chunks[take] + received if reduces else received
        phase = "reduce-scatter" if reduces else "all-gather"
        number = step % (world - 1) + 1
        notes.add(
            f"{phase} {number} of {world - 1}", cells(), f"sends chunk {give}, {'adds' if reduces else 'takes'} {take}"
        )


def tree(rank: int, world: int, notes: Notes) -> None:
    """Tree all-reduce: pairs add up to rank 0, then the sum goes back the same way."""
    total = torch.full((256,), float(2**rank))
    notes.add("start", [whose(total[0].item(), world)])
    distances = [2**level for level in range((world - 1).bit_length())]
    for distance in distances:
        doing = "has given its sum away" if rank % distance else "waits"
        if rank % (2 * distance) == distance:
            dist.send(total, rank - distance)
            doing = f"sends its sum to rank {rank - distance}"
        elif rank % (2 * distance) == 0 and rank + distance < world:
            received = torch.empty_like(total)
            dist.recv(received, rank + distance)
            total += received
            doing = f"adds what rank {rank + distance} sent"
        notes.add(f"up, distance {distance}", [whose(total[0].item(), world)], doing)
    for distance in reversed(distances):
        doing = ""
        if rank % (2 * distance) == 0 and rank + distance < world:
            dist.send(total, rank + distance)
            doing = f"sends the total to rank {rank + distance}"
        elif rank % (2 * distance) == distance:
            dist.recv(total, rank - distance)
            doing = f"takes the total from rank {rank - distance}"
        notes.add(f"down, distance {distance}", [whose(total[0].item(), world)], doing)


def ddp(rank: int, world: int, notes: Notes) -> None:
    """Data parallel: the gradient of a layer is averaged while backward computes the layers below it."""
    layers = 4
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    cells: Cells = [("", "empty")] * layers
    waiting: list[tuple[int, Any]] = []

    def ready(layer: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            time.sleep(_BLOCK_SECONDS)  # stands for the work of a real layer
            assert parameter.grad is not None
            waiting.append((layer, dist.all_reduce(parameter.grad, async_op=True)))
            cells[layer] = ("on its way", "part")
            notes.add("", cells, f"backward has layer {layer}: its all-reduce begins, backward goes on")

        return hook

    for layer, module in enumerate(model):
        next(module.parameters()).register_post_accumulate_grad_hook(ready(layer))  # type: ignore[no-untyped-call]
    notes.add("", cells, "forward")
    model(torch.randn(8, 64)).sum().backward()
    for layer, work in waiting:
        work.wait()
        cells[layer] = ("averaged", "done")
        notes.add("", cells, f"waits for layer {layer}: averaged")
    notes.add("", cells, "the optimizer's step")


def pipeline(rank: int, world: int, notes: Notes) -> None:
    """Pipeline, one forward one backward: stages work on different micro-batches at the same time."""
    micro_batches = 2 * world
    ahead = min(world - 1 - rank, micro_batches)
    order = [("F", number) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        order += [("F", number + ahead), ("B", number)]
    order += [("B", number) for number in range(micro_batches - ahead, micro_batches)]
    cells: Cells = [("", "empty")] * micro_batches
    sends = []
    for kind, number in order:
        before, after = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
        data = torch.zeros(1024)
        if 0 <= before < world:
            dist.recv(data, before)
        cells[number] = (kind, "part")
        notes.add("", cells, f"{'forward' if kind == 'F' else 'backward'} of micro-batch {number}")
        time.sleep(_BLOCK_SECONDS * (1 if kind == "F" else 2))
        if 0 <= after < world:
            sends.append((send_later(data, after), data))
        cells[number] = ("F", "own") if kind == "F" else ("B", "done")
    for work, _ in sends:
        work.wait()
    notes.add("", cells, "has ended")


def zero(rank: int, world: int, notes: Notes) -> None:
    """ZeRO 3: each rank keeps a slice of every layer; layers are gathered for use, gradients scattered after it."""
    layers, slice_size = 3, 256
    owned = [torch.full((slice_size,), float(layer)) for layer in range(layers)]
    sliced: Cells = [(f"1/{world}", "own")] * layers
    notes.add("start", sliced, f"holds 1/{world} of each layer")
    for layer in range(layers):
        whole = [torch.empty(slice_size) for _ in range(world)]
        dist.all_gather(whole, owned[layer])
        shown = [*sliced[:layer], ("whole", "part"), *sliced[layer + 1 :]]
        notes.add(f"forward of layer {layer}", shown, f"gathers layer {layer}, computes, frees it")
    for layer in reversed(range(layers)):
        whole = [torch.empty(slice_size) for _ in range(world)]
        dist.all_gather(whole, owned[layer])
        gradient = [torch.ones(slice_size) for _ in range(world)]
        mine = torch.empty(slice_size)
        dist.reduce_scatter(mine, gradient)
        shown = [*sliced[:layer], ("whole", "part"), *([("gradient", "done")] * (layers - 1 - layer))]
        notes.add(f"backward of layer {layer}", shown, f"gathers layer {layer}; keeps 1/{world} of the summed gradient")
        owned[layer] -= 0.1 * mine / world
    notes.add("optimizer", [("updated", "done")] * layers, "updates its slices only")


def tensor(rank: int, world: int, notes: Notes) -> None:
    """Tensor parallel: the first layer is split by columns, the second by rows; one all-reduce joins the sums."""
    width, hidden = 32, 64
    inputs = torch.ones(8, width)
    first, second = torch.full((hidden // world, width), 0.01), torch.full((width, hidden // world), 0.01)
    share = f"1/{world}"
    notes.add("start", [("input", "done"), (f"W1 {share}", "own"), (f"W2 {share}", "own"), ("", "empty")])
    middle = torch.relu(inputs @ first.T)
    notes.add(
        "first layer", [("input", "done"), (f"h {share}", "part"), (f"W2 {share}", "own"), ("", "empty")], "no message"
    )
    part = middle @ second.T
    notes.add(
        "second layer", [("input", "done"), (f"h {share}", "part"), ("summand", "part"), ("", "empty")], "no message"
    )
    dist.all_reduce(part)
    cells: Cells = [("input", "done"), (f"h {share}", "part"), ("summand", "part"), ("output", "done")]
    notes.add("all-reduce", cells, "one all-reduce per pair of layers")


def server(rank: int, world: int, notes: Notes) -> None:
    """Parameter server, asynchronous: rank 0 applies each gradient when it comes; a slow worker holds none up."""
    steps, weights = 3, torch.zeros(512)
    if rank == 0:
        applied = [0] * world
        notes.add("", [("version 0", "own")], "serves")
        for version in range(1, steps * (world - 1) + 1):
            gradient = torch.empty_like(weights)
            worker = dist.recv(gradient)
            weights -= gradient
            applied[worker] += 1
            dist.send(weights, worker)
            notes.add("", [(f"version {version}", "done")], f"applies gradient {applied[worker]} of rank {worker}")
        return
    for step in range(1, steps + 1):
        notes.add("", [(f"step {step}", "part")], "computes a gradient")
        time.sleep(_BLOCK_SECONDS * rank)
        dist.send(torch.ones(512), 0)
        dist.recv(weights, 0)
        notes.add("", [(f"{int(-weights[0].item())} applied", "done")], "takes the weights")


SHOWS = {
    "ring": Show("Ring all-reduce", 4, ring, True),
    "tree": Show("Tree all-reduce", 4, tree, True),
    "ddp": Show("Data parallel: all-reduce during backward", 2, ddp, False),
    "zero": Show("ZeRO 3 and FSDP: slices, gathered for use", 3, zero, True),
    "pipeline": Show("Pipeline: one forward, one backward", 3, pipeline, False),
    "tensor": Show("Tensor parallel: columns, then rows", 2, tensor, True),
    "server": Show("Parameter server, asynchronous", 3, server, False, 2),
}


def run_show(module: Any, rank: int, world: int, name: str) -> list[Note]:
    """Run an algorithm on this rank and return its notes."""
    notes = Notes()
    dist.barrier()
    SHOWS[name].run(rank, world, notes)
    return notes.all
