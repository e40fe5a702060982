"""Grade template_trainer.py; the loop is in synchronous_loop.py, the all-reduces are in all_reduce.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grader.checks.all_reduce import (
    HANG_SECONDS,
    check_waited,
    grade_exchange,
    grade_measure,
    grade_root,
    grade_tree,
)
from grader.checks.synchronous_loop import grade_loop
from grader.exercise import Attempt, Exercise, Mistake
from grader.ranks import Answer

TEMPLATE = "phase1_data_parallel/template_trainer.py"
BROADCAST = "Begin with the weights of rank 0"
AVERAGE = "Average the gradients of all ranks"
LOOP = "Write the synchronous loop"
ROOT = "All-reduce through one root"
EXCHANGE = "All-reduce by exchange with everyone"
TREE = "All-reduce along a tree"
MEASURE = "Measure and predict the cost of an all-reduce"


# broadcast-model -----------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A model with all kinds of tensors: weights, frozen weights, buffers, integers, and a buffer not in state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        norm = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(norm, nn.Linear(4, 4).requires_grad_(False))
        self.register_buffer("table", torch.rand(5), persistent=False)
        self.register_buffer("exact", torch.rand(3, dtype=torch.float64))
        self.register_buffer("count", torch.randint(2**40, 2**50, ()))
        self.inner.eval()
        with torch.no_grad():
            norm.weight.normal_()
            for buffer in norm.buffers():
                buffer.copy_(torch.randint(1, 10**6, buffer.shape))
        self.first.weight.grad = torch.rand(4, 3)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def rank_broadcast(module: ModuleType, rank: int, world: int, seed: int) -> dict[str, Any]:
    """Broadcast a model that differs on each rank."""
    torch.manual_seed(seed + rank)
    model = Mixed()
    before = [(id(tensor), tensor.requires_grad) for tensor in (*model.parameters(), *model.buffers())]
    modes = [each.training for each in model.modules()]
    gradients = gradients_of(model)
    recorded: list[bool] = []
    with watched_broadcast(recorded):
        module.broadcast_model(model)
    after = [(id(tensor), tensor.requires_grad) for tensor in (*model.parameters(), *model.buffers())]
    others = []
    if modes != [each.training for each in model.modules()]:
        others.append("train or eval mode of a module")
    if not same_gradients(gradients, gradients_of(model)):
        others.append("gradient (param.grad)")
    return {"tensors": tensors_of(model), "same": before == after, "recorded": any(recorded), "others": others}


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    """Return copies of all gradients."""
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def same_gradients(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    """Whether two lists have equal gradients, and None at the same places."""
    return all(
        left is right if left is None or right is None else torch.equal(left, right)
        for left, right in zip(one, other, strict=True)
    )


@contextmanager
def watched_broadcast(recorded: list[bool]) -> Iterator[None]:
    """Note for each broadcast whether autograd sees it: a tensor requires a gradient, and recording is on."""
    real = dist.ProcessGroup.broadcast

    def broadcast(group: Any, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        recorded.append(torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        return real(group, tensors, *args, **kwargs)

    with patch.object(dist.ProcessGroup, "broadcast", broadcast):
        yield


def grade_broadcast(attempt: Attempt) -> None:
    """Check the values of all tensors on three ranks against models that are built here."""
    seed, world = attempt.seed(), 3
    try:
        answers = attempt.run(rank_broadcast, world, (seed,), timeout=HANG_SECONDS)
    except Mistake as mistake:
        if "has ended" not in str(mistake):
            raise
        raise Mistake(
            f"Every rank has to call broadcast, the receiving ones as well. {mistake}", see=BROADCAST
        ) from None
    models = []
    for rank in range(world):
        torch.manual_seed(seed + rank)
        models.append(tensors_of(Mixed()))
    check_waited(answers)
    for answer in answers:
        check_same_model(answer, models)
    for answer in answers:
        if not answer.value["same"]:
            raise Mistake(
                f"Rank {answer.rank}: parameters are new objects, or their requires_grad changed: an optimizer that "
                "was made before still holds the old ones. Write into the tensors that exist.",
                see=BROADCAST,
            )
        if answer.value["others"]:
            raise Mistake(
                f"Rank {answer.rank}: broadcast_model changed the {answer.value['others'][0]}: it gives values to "
                "parameters and buffers, and leaves all else alone.",
                see=BROADCAST,
            )
        if answer.value["recorded"]:
            raise Mistake(
                f"Rank {answer.rank}: a parameter that requires a gradient is given to broadcast while autograd "
                "records: the next backward() warns that it goes through the broadcast. Give it tensor.detach(), which "
                "shares the memory, or use torch.no_grad().",
                see=BROADCAST,
            )


def check_same_model(answer: Answer, models: list[dict[str, Tensor]]) -> None:
    """Raise a Mistake unless the rank has the tensors of rank 0."""
    found, rank = answer.value["tensors"], answer.rank
    wrong = [name for name in models[0] if not torch.equal(found[name], models[0][name])]
    if not wrong:
        return
    if rank == 0:
        mean = torch.stack([model[wrong[0]].double() for model in models]).mean(0)
        what = "the mean over the ranks" if torch.allclose(found[wrong[0]].double(), mean) else "other values"
        for other, model in enumerate(models[1:], 1):
            what = f"the values of rank {other}" if torch.equal(found[wrong[0]], model[wrong[0]]) else what
        raise Mistake(f"Rank 0's {wrong[0]} changed to {what}: rank 0 is the source (src=0) and keeps its values.")
    kept = [name for name in wrong if torch.equal(found[name], models[rank][name])]
    if kept == [name for name in models[0] if not torch.equal(models[rank][name], models[0][name])]:
        raise Mistake(
            f"Rank {rank} still has all its own values: what was received is not in its model.", see=BROADCAST
        )
    kinds = {
        "first.": "a parameter",
        "inner.0.weight": "a parameter of an inner module: go over all of model.parameters()",
        "running": "a buffer: model.parameters() does not list it, model.buffers() does",
        "inner.1": "a frozen parameter (requires_grad=False): its value differs between ranks like all others",
        "num_batches": "an integer buffer: it needs the value of rank 0 as well",
        "exact": "a float64 buffer: it must not pass through another dtype",
        "count": "an integer buffer with a large value: it must not pass through a float",
        "table": "a buffer that is not part of the state_dict (persistent=False): model.buffers() lists it",
    }
    name, kind = next((name, text) for part, text in kinds.items() for name in wrong if part in name)
    state = "still has its own value" if name in kept else "has a wrong value"
    raise Mistake(f"Rank {rank}: {name} {state}. It is {kind}.", see=BROADCAST)


# average-gradients ---------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Four layers of one shape in float64, the second one frozen, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))  # parameters() gives it before the layers


def gradient(seed: int, rank: int, number: int, shape: torch.Size) -> Tensor:
    """Return the gradient of parameter `number` on `rank`."""
    generator = torch.Generator().manual_seed(seed + 100 * rank + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rank_average(module: ModuleType, rank: int, world: int, seed: int, missing: dict[int, list[int]]) -> dict[str, Any]:
    """Average gradients that the grader has set; `missing` lists the parameters without one by rank."""
    torch.manual_seed(seed)
    model = Layers()
    before = tensors_of(model)
    for number, param in enumerate(model.parameters()):
        if param is model.layers[1].weight or (param.requires_grad and number not in missing.get(rank, [])):
            param.grad = gradient(seed, rank, number, param.shape)
    module.average_gradients(model)
    after = tensors_of(model)
    grads = {name: None if param.grad is None else param.grad.detach() for name, param in model.named_parameters()}
    return {"grads": grads, "moved": [name for name in before if not torch.equal(before[name], after[name])]}


def grade_average(attempt: Attempt) -> None:
    """Check the means on three ranks, then with parameters that have no gradient on one rank, and on two of them.

    Parameter 0 is the one of the model itself; 5 and 6 are the weight and the bias of layer 2, 7 and 8 of layer 3.
    """
    world = 3
    other = attempt.random.randint(1, 2)
    for missing in ({}, {1: [5, 6], 2: [6]}, {0: [0, 7, 8], other: [8]}):
        seed = attempt.seed()
        try:
            answers = attempt.run(rank_average, world, (seed, missing), timeout=HANG_SECONDS)
        except Mistake as mistake:
            if not missing and "NoneType" in str(mistake):
                raise Mistake(
                    f"{mistake}. A parameter may have no gradient here: the ones of layers.1 are frozen "
                    "(requires_grad=False), and their grad is None. Leave them out.",
                    see=AVERAGE,
                ) from mistake
            if not missing:
                raise
            name, rank = ("layers.3.weight", 0) if 0 in missing else ("layers.2.weight", 1)
            raise Mistake(
                f"In this run {name} has no gradient (None) on rank {rank} only. It counts as zeros there: rank {rank} "
                f"must make the same calls as the others. What was seen: {mistake}",
                see=AVERAGE,
            ) from mistake
        check_waited(answers)
        for answer in answers:
            if any(call.kind == "reduce" for call in answer.calls):
                raise Mistake(
                    "dist.reduce gives the sum to one rank only: all ranks need it, use all_reduce.", see=AVERAGE
                )
            check_gradients(answer, seed, world, missing)


def check_gradients(answer: Answer, seed: int, world: int, missing: dict[int, list[int]]) -> None:
    """Raise a Mistake unless the rank holds the means."""
    if answer.value["moved"]:
        raise Mistake(
            f"Rank {answer.rank}: average_gradients changed the weight {answer.value['moved'][0]}; it should change "
            "gradients (param.grad) only.",
            see=AVERAGE,
        )
    for number, (name, found) in enumerate(answer.value["grads"].items()):
        if "layers.1." in name:
            if name.endswith("bias") and found is not None:
                raise Mistake(
                    f"Rank {answer.rank}: the frozen {name} (requires_grad=False) has a gradient now: leave it alone.",
                    see=AVERAGE,
                )
            kept = gradient(seed, answer.rank, number, torch.Size((3, 3)))
            if name.endswith("weight") and (found is None or not torch.equal(found, kept)):
                raise Mistake(
                    f"Rank {answer.rank}: the frozen {name} (requires_grad=False) has a gradient of an earlier stage "
                    "of the training, and average_gradients changed it: leave frozen parameters alone.",
                    see=AVERAGE,
                )
            continue
        shape = torch.Size((3, 3)) if name.endswith("weight") else torch.Size((3,))
        grads = [
            None if number in missing.get(rank, []) else gradient(seed, rank, number, shape) for rank in range(world)
        ]
        check_mean(f"Rank {answer.rank}, {name}", answer.rank, found, grads)


def check_mean(where: str, rank: int, found: Tensor | None, grads: list[Tensor | None]) -> None:
    """Raise a Mistake unless `found` is the mean of the gradients, None counted as zeros."""
    world, there = len(grads), [grad for grad in grads if grad is not None]
    total = torch.stack(there).sum(0)
    if found is not None and torch.allclose(found, total / world, rtol=1e-12, atol=1e-12):
        return
    if found is None:
        raise Mistake(
            f"{where}: the gradient is still None on this rank, while other ranks have the mean: weights would drift "
            "apart. Store the mean on every rank.",
            see=AVERAGE,
        )
    guesses = [
        (total, f"the result is the sum over the {world} ranks, not their mean: divide by the number of ranks"),
        (total / len(there), f"the sum is divided by {len(there)}, the ranks with a gradient; None counts as zeros"),
        (total / 2, f"the sum is divided by 2; the number of ranks here is {world}: dist.get_world_size()"),
        (total / world**2, "the mean is divided by the number of ranks a second time"),
        (
            torch.stack(there).amax(0) / world,
            "the result is the maximum over the ranks, divided: the sum is the default",
        ),
        (torch.stack(there).amax(0), "the result is the maximum over the ranks: the sum is the default of all_reduce"),
        (torch.zeros_like(total), "the gradient is zero: it was cleared before or after the averaging"),
    ]
    own = grads[rank]
    if own is not None:
        guesses += [
            (own, "this rank still has its own gradient: the result is not stored, or only one rank gets it"),
            (own / world, "this rank has its own gradient divided by the ranks: nothing was summed"),
        ]
    for value, text in guesses:
        if torch.allclose(found, value, rtol=1e-9, atol=1e-9):
            raise Mistake(f"{where}: {text}.", see=AVERAGE)
    if torch.allclose(found, total / world, rtol=1e-2, atol=1e-2):
        raise Mistake(
            f"{where}: the mean is right to {digits(found, total / world)} digits only: gradients are float64 here; "
            "keep the dtype of the gradient while you add.",
            see=AVERAGE,
        )
    raise Mistake(f"{where}: the gradient is {found.flatten()[0]:.4f}..., expected {total.flatten()[0] / world:.4f}...")


def digits(found: Tensor, expected: Tensor) -> int:
    """Return the number of equal decimal digits."""
    error = float((found - expected).abs().max() / expected.abs().max())
    return int(-math.log10(max(error, 1e-16)))


COLLECTIVES = (
    "torch.distributed.all_reduce",
    "torch.distributed.reduce",
    "torch.distributed.broadcast",
    "torch.distributed.all_gather",
    "torch.distributed.gather",
    "torch.distributed.scatter",
    "torch.distributed.reduce_scatter",
    "torch.distributed.all_to_all",
)
DDP = ("torch.nn.parallel.DistributedDataParallel",)

EXERCISES = (
    Exercise(
        name="broadcast-model",
        title=BROADCAST,
        template=TEMPLATE,
        target="broadcast_model",
        points=5,
        grade=grade_broadcast,
        forbidden=DDP,
    ),
    Exercise(
        name="average-gradients",
        title=AVERAGE,
        template=TEMPLATE,
        target="average_gradients",
        points=10,
        grade=grade_average,
        forbidden=DDP,
    ),
    Exercise(
        name="synchronous-loop",
        title=LOOP,
        template=TEMPLATE,
        target="train",
        points=15,
        grade=grade_loop,
        forbidden=DDP,
    ),
    Exercise(
        name="root-all-reduce",
        title=ROOT,
        template=TEMPLATE,
        target="root_all_reduce",
        points=5,
        grade=grade_root,
        forbidden=COLLECTIVES,
    ),
    Exercise(
        name="exchange-all-reduce",
        title=EXCHANGE,
        template=TEMPLATE,
        target="exchange_all_reduce",
        points=10,
        grade=grade_exchange,
        forbidden=COLLECTIVES,
    ),
    Exercise(
        name="tree-all-reduce",
        title=TREE,
        template=TEMPLATE,
        target="tree_all_reduce",
        points=15,
        grade=grade_tree,
        forbidden=COLLECTIVES,
    ),
    Exercise(
        name="measure-all-reduce",
        title=MEASURE,
        template=TEMPLATE,
        target="measure_all_reduce",
        points=10,
        grade=grade_measure,
    ),
)
