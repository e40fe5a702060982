"""Graders of template_model_parallel.py: a split model and a split layer; pipelines.py grades the rest."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from grader.checks.pipeline_plans import grade_schedule
from grader.checks.pipelines import grade_run
from grader.checks.talk import COLLECTIVES, run_explained
from grader.exercise import Attempt, Exercise, Mistake
from grader.ranks import Answer

TEMPLATE = "phase2_advanced/template_model_parallel.py"
SEE_SPLIT, SEE_TENSOR = "Split a model over ranks", "Split a layer (tensor parallelism)"
WAITS = (
    "Each send needs its receive: activations go from rank r to r + 1, then gradients from r + 1 back to r, one "
    "message each"
)
NO_GRADIENT = {
    "NoneType": "A received tensor has no .grad unless requires_grad_() was called on it before the layers ran",
    "does not require grad": "The output has no history here: was it detached, or did the layers run under no_grad?",
}


def layer(seed: int, number: int, width: int) -> nn.Module:
    """Return layer `number`, the same in every process."""
    torch.manual_seed(seed + number)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def batch(seed: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)


def close(one: Tensor, two: Tensor) -> bool:
    """Say whether two tensors are equal to five digits."""
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-4, atol=1e-6)


# --- split-model ------------------------------------------------------------------------------------------------------


def rank_split(
    module: ModuleType, rank: int, world: int, seed: int, count: int, shape: Sequence[int]
) -> dict[str, Any]:
    """Build, run two batches, and return what this rank holds."""
    built: list[int] = []

    def build(number: int) -> nn.Module:
        built.append(number)
        return layer(seed, number, shape[1])

    model = module.SplitModel(build, count)
    losses, gradients = [], []
    for step in range(2):
        inputs, targets = batch(seed + step, shape)
        losses.append(
            model.step(inputs if rank == 0 else None, targets if rank == world - 1 else None, torch.Size(shape))
        )
        parameters = list(model.layers.parameters())
        gradients.append([None if each.grad is None else each.grad.clone() for each in parameters])
    values = [each.detach() for each in parameters]
    return {"built": built, "losses": losses, "gradients": gradients, "values": values}


def grade_split(attempt: Attempt) -> None:
    """Check the layers, the gradients of two batches, the losses and the messages."""
    ranks, count = 3, attempt.random.choice((5, 8))  # two layers more than a multiple of the ranks
    shape, seed = (attempt.random.randint(3, 9), attempt.random.randint(4, 8)), attempt.seed()
    answers = run_explained(
        attempt, rank_split, ranks, (seed, count, shape), waits=WAITS, errors=NO_GRADIENT, see=SEE_SPLIT
    )
    check_layers([answer.value["built"] for answer in answers], count)
    whole = nn.Sequential(*(layer(seed, number, shape[1]) for number in range(count)))
    right: list[Tensor] = []
    for step in range(2):
        inputs, targets = batch(seed + step, shape)
        loss = F.mse_loss(whole(inputs), targets)
        old = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in whole.parameters()]
        loss.backward()
        right.append(loss.detach())
        check_gradients(answers, step, [each.grad for each in whole.parameters()], old)  # type: ignore[misc]
    check_losses(answers, right, shape)
    check_messages(answers, shape)


def check_layers(built: list[list[int]], count: int) -> None:
    """Raise unless each layer is built once, in order, evenly."""
    for rank, numbers in enumerate(built):
        if len(numbers) == count and len(built) > 1:
            raise Mistake(
                f"rank {rank} builds all {count} layers: it should build only its own, so that the model needs less "
                "memory per rank",
                SEE_SPLIT,
            )
        if numbers != list(range(numbers[0], numbers[0] + len(numbers)) if numbers else []):
            raise Mistake(f"rank {rank} holds the layers {numbers}: they must be neighbours, in order", SEE_SPLIT)
    flat = [number for numbers in built for number in numbers]
    lost = sorted(set(range(count)) - set(flat))
    if lost:
        raise Mistake(f"the ranks hold {built} of {count} layers: layer {lost[0]} is on no rank", SEE_SPLIT)
    if len(flat) != len(set(flat)):
        raise Mistake(f"the ranks hold {built}: a layer is on two ranks", SEE_SPLIT)
    if flat != list(range(count)):
        raise Mistake(f"the ranks hold {built}: rank 0 must hold the first layers, the last rank the last", SEE_SPLIT)
    sizes = [len(numbers) for numbers in built]
    if max(sizes) - min(sizes) > 1:
        raise Mistake(f"the ranks hold {sizes} layers: the numbers may differ by one at most", SEE_SPLIT)


def check_gradients(answers: Sequence[Answer], step: int, right: Sequence[Tensor], old: Sequence[Tensor]) -> None:
    """Raise unless the gradients of all ranks, one after the other, are those of one process."""
    number = 0
    for answer in reversed(answers):  # the first wrong gradient in the order of backward is the cause
        for found in reversed(answer.value["gradients"][step]):
            number += 1
            if found is not None and close(found, right[-number]):
                continue
            where = f"after batch {step} the gradients of rank {answer.rank}"
            if found is None:
                raise Mistake(f"{where} are None: backward did not run there, or its output was detached", SEE_SPLIT)
            fresh, before = right[-number] - old[-number], old[-number]
            if step and close(found, fresh):
                raise Mistake(f"{where} are those of this batch alone: add to .grad, do not clear it", SEE_SPLIT)
            if step and close(found, before):
                raise Mistake(
                    f"{where} are those of the batch before: this batch's backward did not reach it", SEE_SPLIT
                )
            factor = (found.norm() / right[-number].norm()).item()
            if close(found, factor * right[-number]):
                raise Mistake(
                    f"{where} are {factor:.3g} times those of one process: is the loss the mean over all elements, and "
                    "does each gradient travel once and unchanged?",
                    SEE_SPLIT,
                )
            raise Mistake(
                f"{where} differ from those of one process: is what you receive the gradient of what you sent, is the "
                "gradient you send that of what you received, and does backward start from it?",
                SEE_SPLIT,
            )


def check_losses(answers: Sequence[Answer], right: list[Tensor], shape: Sequence[int]) -> None:
    """Raise unless the last rank, and only it, returns the loss."""
    for answer in answers:
        losses = answer.value["losses"]
        if answer.rank < len(answers) - 1:
            if any(loss is not None for loss in losses):
                raise Mistake(
                    f"rank {answer.rank} returned a loss: only the last rank knows it, others None", SEE_SPLIT
                )
            continue
        for step, (loss, wanted) in enumerate(zip(losses, right, strict=True)):
            if loss is None:
                raise Mistake("the last rank returned None: it should return the loss", SEE_SPLIT)
            if loss.requires_grad:
                raise Mistake("the loss has its history: return it detached, so that its memory is freed", SEE_SPLIT)
            if not close(loss, wanted):
                raise Mistake(f"batch {step}: the last rank returned the loss {loss:.5f}, not {wanted:.5f}", SEE_SPLIT)


def check_messages(answers: Sequence[Answer], shape: Sequence[int]) -> None:
    """Raise unless each border between two ranks was crossed once per batch and direction."""
    size, last = 4 * shape[0] * shape[1], len(answers) - 1
    for answer in answers:
        for call in answer.calls:
            if call.line and call.peer is None:
                raise Mistake(f"line {call.line} calls {call.kind}: neighbours need only send and recv", SEE_SPLIT)
            if call.is_send and abs((call.peer or 0) - answer.rank) != 1:
                raise Mistake(f"rank {answer.rank} sends to rank {call.peer}, which is not its neighbour", SEE_SPLIT)
        wanted = 2 * ((answer.rank > 0) + (answer.rank < last))
        if answer.messages != wanted or answer.sent != wanted * size:
            raise Mistake(
                f"rank {answer.rank} sent {answer.messages} messages with {answer.sent} bytes in 2 batches; it should "
                f"be {wanted} messages of {size} bytes: the activations and the gradients, once each",
                SEE_SPLIT,
            )


# --- column-row-linear ------------------------------------------------------------------------------------------------


def whole_layers(seed: int, sizes: Sequence[int]) -> tuple[nn.Linear, nn.Linear, Tensor]:
    """Return both layers and a batch, the same in every process."""
    torch.manual_seed(seed)
    wide, hidden, out, rows = sizes
    return nn.Linear(wide, hidden), nn.Linear(hidden, out), torch.randn(rows, wide)


def rank_slices(module: ModuleType, rank: int, world: int, seed: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Build, and return the parameters and the bytes that each one keeps in memory."""
    first, second, _ = whole_layers(seed, sizes)
    found = dict(module.ColumnRowLinear(first, second).named_parameters())
    return {
        "values": {name: each.detach() for name, each in found.items()},
        "held": {name: each.untyped_storage().nbytes() for name, each in found.items()},
    }


def rank_tensor_parallel(module: ModuleType, rank: int, world: int, seed: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Run forward and backward once; a barrier marks the end of forward in the list of calls."""
    first, second, data = whole_layers(seed, sizes)
    pair = module.ColumnRowLinear(first, second)
    dist.barrier()
    inputs = data.clone().requires_grad_()
    output = pair(inputs)
    dist.barrier()
    (output * torch.arange(1.0, output.numel() + 1).view_as(output)).sum().backward()
    found = dict(pair.named_parameters())
    return {
        "output": output.detach(),
        "inputs": inputs.grad,
        "gradients": {name: each.grad for name, each in found.items()},
        "changed": not torch.equal(inputs.detach(), data),
    }


def grade_tensor_parallel(attempt: Attempt) -> None:
    """Check the slices, the output, all gradients and the collectives."""
    ranks = attempt.random.choice((2, 3))
    sizes = (attempt.random.randint(3, 7), ranks * attempt.random.randint(2, 5), attempt.random.randint(3, 7), 4)
    seed = attempt.seed()
    first, second, data = whole_layers(seed, sizes)
    for answer in attempt.run(rank_slices, ranks=ranks, args=(seed, sizes)):
        check_slices(answer, first, second, ranks)
    same = "All ranks must make the same collective calls in the same order"
    answers = run_explained(attempt, rank_tensor_parallel, ranks, (seed, sizes), waits=same, see=SEE_TENSOR)
    inputs = data.clone().requires_grad_()
    hidden = F.gelu(first(inputs))
    output = second(hidden)
    (output * torch.arange(1.0, output.numel() + 1).view_as(output)).sum().backward()
    for answer in answers:
        other = answers[answer.rank - 1]
        check_output(answer, output.detach(), second.bias.detach(), len(answers), other)
    for answer in answers:
        check_tensor_gradients(answer, first, second, inputs.grad, len(answers))  # type: ignore[arg-type]
        check_collectives(answer, output.numel(), data.numel())


def slices_of(first: nn.Linear, second: nn.Linear, rank: int, world: int, *, gradients: bool) -> dict[str, Tensor]:
    """Return this rank's slices of the whole layers, or of their gradients."""
    width = first.out_features // world
    block = slice(rank * width, (rank + 1) * width)

    def of(parameter: Tensor) -> Tensor:
        return parameter.grad if gradients else parameter.detach()  # type: ignore[return-value]

    return {
        "column_weight": of(first.weight)[block],
        "column_bias": of(first.bias)[block],
        "row_weight": of(second.weight)[:, block],
        "row_bias": of(second.bias),
    }


def check_slices(answer: Answer, first: nn.Linear, second: nn.Linear, world: int) -> None:
    """Raise unless the parameters are copies of this rank's slices."""
    values = answer.value["values"]
    for name, right in slices_of(first, second, answer.rank, world, gradients=False).items():
        if name not in values:
            raise Mistake(f"there is no parameter {name}: keep the four names of the template", SEE_TENSOR)
        found = values[name]
        where = f"{name} of rank {answer.rank}"
        if found.shape != right.shape:
            raise Mistake(
                f"{where} has the shape {tuple(found.shape)}; it should be {tuple(right.shape)}: column_weight takes "
                "rows of first.weight (its outputs), row_weight columns of second.weight",
                SEE_TENSOR,
            )
        if not torch.equal(found, right):
            raise Mistake(f"{where} is not block {answer.rank} of the whole layer, neighbouring features in order",
                          SEE_TENSOR)  # fmt: skip
        if answer.value["held"][name] > right.numel() * 4:
            raise Mistake(f"{where} is a view that keeps the whole layer in memory: clone the slice", SEE_TENSOR)
    if len(values) != 4:
        raise Mistake(f"the module has the parameters {sorted(values)}; four are enough", SEE_TENSOR)


def check_output(answer: Answer, right: Tensor, bias: Tensor, world: int, other: Answer) -> None:
    """Raise unless the output is that of the whole layers; say what it is instead."""
    found = answer.value["output"]
    if answer.value["changed"]:
        raise Mistake("the inputs were changed in place: all_reduce works in place, give it a clone", SEE_TENSOR)
    if close(found, right):
        return
    if close(found - bias * (world - 1), right):
        raise Mistake(
            f"the row bias is in the output {world} times, once per rank: add it after the all_reduce", SEE_TENSOR
        )
    if close(found + bias, right):
        raise Mistake("the row bias is not in the output: add it after the all_reduce", SEE_TENSOR)
    if close((found - bias) * world + bias, right) or close(found * world, right):
        raise Mistake("the parts of the output were averaged: they must be summed", SEE_TENSOR)
    if not close(found, other.value["output"]):
        raise Mistake(
            f"ranks {answer.rank} and {other.rank} have different outputs: each has only its part. Sum "
            "them with all_reduce",
            SEE_TENSOR,
        )
    raise Mistake(
        "the output is not second(gelu(first(inputs))): GELU comes between the layers, before the parts are summed",
        SEE_TENSOR,
    )


def check_tensor_gradients(answer: Answer, first: nn.Linear, second: nn.Linear, inputs: Tensor, world: int) -> None:
    """Raise unless the gradients are the slices of those of the whole layers."""
    for name, right in slices_of(first, second, answer.rank, world, gradients=True).items():
        found = answer.value["gradients"][name]
        where = f"the gradient of {name} on rank {answer.rank}"
        if found is None:
            raise Mistake(f"{where} is None: the all_reduce of forward must let the gradient through", SEE_TENSOR)
        if close(found, right * world):
            raise Mistake(
                f"{where} is {world} times too large: the gradient of the output is whole on every rank already, so "
                "the backward of the forward's all_reduce passes it on and sums nothing",
                SEE_TENSOR,
            )
        if not close(found, right):
            raise Mistake(f"{where} is not that of the whole layer", SEE_TENSOR)
    found = answer.value["inputs"]
    if found is None:
        raise Mistake("inputs.grad is None: the function before the column layer must pass the gradient on", SEE_TENSOR)
    if close(found, inputs * world):
        raise Mistake(f"inputs.grad is {world} times too large: it was summed twice", SEE_TENSOR)
    if close(found * world, inputs):
        raise Mistake("inputs.grad is the mean of the parts: they must be summed", SEE_TENSOR)
    if not close(found, inputs):
        raise Mistake(
            f"inputs.grad of rank {answer.rank} is only the part that came through its block: sum the parts over the "
            "ranks in backward, before the column layer",
            SEE_TENSOR,
        )


def check_collectives(answer: Answer, outputs: int, inputs: int) -> None:
    """Raise unless there is one all_reduce in forward and one in backward, of the right sizes."""
    marks = [index for index, call in enumerate(answer.calls) if call.kind == "barrier" and not call.line]
    forward, backward = answer.calls[marks[0] + 1 : marks[1]], answer.calls[marks[1] + 1 :]
    for name, calls, size in (("forward", forward, outputs), ("backward", backward, inputs)):
        kinds = [call.kind for call in calls]
        if kinds != ["all_reduce"]:
            raise Mistake(
                f"{name} makes the calls {kinds}; one all_reduce is enough: the hidden features stay on their rank",
                SEE_TENSOR,
            )
        if calls[0].bytes != 4 * size:
            raise Mistake(f"the all_reduce of {name} moves {calls[0].bytes} bytes, not {4 * size}", SEE_TENSOR)


EXERCISES = (
    Exercise(
        name="split-model",
        title="Split a model over ranks",
        template=TEMPLATE,
        target="SplitModel",
        points=10,
        grade=grade_split,
        forbidden=COLLECTIVES,
    ),
    Exercise(
        name="pipeline-schedule",
        title="Plan a pipeline",
        template=TEMPLATE,
        target="pipeline_schedule",
        points=10,
        grade=grade_schedule,
    ),
    Exercise(
        name="run-pipeline",
        title="Run a pipeline",
        template=TEMPLATE,
        target="run_pipeline",
        points=20,
        grade=grade_run,
        forbidden=(*COLLECTIVES, "torch.distributed.barrier"),
    ),
    Exercise(
        name="column-row-linear",
        title="Split a layer (tensor parallelism)",
        template=TEMPLATE,
        target="ColumnRowLinear",
        points=15,
        grade=grade_tensor_parallel,
    ),
)
