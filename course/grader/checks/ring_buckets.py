"""Graders of the bucket exercises: grouping of gradients, and their average while backward runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grader.checks.talk import run_explained
from grader.exercise import Attempt, Mistake
from grader.ranks import Answer
from grader.wire import Call

SEE_BUCKETS = "Gradients in buckets"
SEE_OVERLAP = "Communicate while backward runs"
LIMIT = 400


def make_parameters(seed: int, counts: Sequence[int]) -> list[nn.Parameter]:
    """Return parameters: number 1 is frozen, 3 is float64, 5 has no gradient; number 6 is larger than the limit."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, count in enumerate(counts):
        dtype = torch.float64 if number == 3 else torch.float32
        shape = (count // 2, 2) if count % 2 == 0 else (count,)
        parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype), requires_grad=number != 1)
        if number not in (1, 5):
            parameter.grad = torch.randn(shape, generator=generator, dtype=dtype)
        made.append(parameter)
    return made


def rank_groups(module: ModuleType, seed: int, counts: Sequence[int]) -> list[list[int]]:
    """Return the groups as numbers of parameters."""
    parameters = make_parameters(seed, counts)
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    return [[number.get(id(each), -1) for each in group] for group in module.Buckets(parameters, LIMIT).groups]


def rank_flatten(module: ModuleType, seed: int, counts: Sequence[int]) -> tuple[list[Tensor], str]:
    """Return the flat gradients of each group, and what became of the gradients themselves."""
    parameters = make_parameters(seed, counts)
    before = [None if each.grad is None else each.grad.clone() for each in parameters]
    buckets = module.Buckets(parameters, LIMIT)
    flats = []
    for index in range(len(buckets.groups)):
        flats.append(buckets.flatten(index).detach().clone())
        if any((each.grad is None) != (old is None) for each, old in zip(parameters, before, strict=True)):
            return flats, "gone or new: it leaves the gradients as they are, None stays None"
    return flats, ""


def odd_parameters(seed: int) -> list[nn.Parameter]:
    """Return parameters of two types of 2 bytes and one of 8, one gradient missing, one not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for dtype, rows in ((torch.float64, 20), (torch.float64, 31), (torch.bfloat16, 20), (torch.float16, 33)):
        for _ in range(2):
            parameter = nn.Parameter(torch.randn((rows, 2), generator=generator).to(dtype))
            parameter.grad = torch.randn((2, rows), generator=generator).to(dtype).t()
            made.append(parameter)
    made[5].grad = None
    return made


def rank_odd(module: ModuleType, seed: int) -> tuple[list[list[int]], list[Tensor]]:
    """Return the groups of the odd parameters as numbers, and the flat gradients of each."""
    parameters = odd_parameters(seed)
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    buckets = module.Buckets(parameters, LIMIT)
    flats = [buckets.flatten(index).detach().clone() for index in range(len(buckets.groups))]
    return [[number.get(id(each), -1) for each in group] for group in buckets.groups], flats


def rank_unflatten(module: ModuleType, seed: int, counts: Sequence[int]) -> list[Tensor | None]:
    """Write twice the gradients plus one back, and return the gradients of all parameters."""
    parameters = make_parameters(seed, counts)
    buckets = module.Buckets(parameters, LIMIT)
    for index, group in enumerate(buckets.groups):
        old = [torch.zeros_like(each) if each.grad is None else each.grad for each in group]
        buckets.unflatten(index, 2 * torch.cat([each.detach().reshape(-1) for each in old]) + 1)
    return [None if parameter.grad is None else parameter.grad.detach() for parameter in parameters]


def expected_groups(parameters: Sequence[nn.Parameter], limit: int) -> list[list[int]]:
    """Return the groups by their own rule: cut the reversed list wherever the next one does not fit."""
    left = [number for number in reversed(range(len(parameters))) if parameters[number].requires_grad]
    groups = []
    while left:
        take = 1
        while take < len(left):
            members = [parameters[number] for number in left[: take + 1]]
            size = sum(each.numel() * each.element_size() for each in members)
            if size > limit or len({each.dtype for each in members}) > 1:
                break
            take += 1
        groups.append(left[:take])
        left = left[take:]
    return groups


def grade_buckets(attempt: Attempt) -> None:
    """Check the groups, the flat tensors, and what comes back into the gradients."""
    dice = attempt.random
    counts = [dice.choice((10, 14, 22, 27, 33)) for _ in range(12)]
    counts[6] = dice.choice((120, 131))
    counts[9:12] = [47, 50, 3]  # 12 + 200 + 188 bytes fill the first group to its limit
    seed = attempt.seed()
    parameters = make_parameters(seed, counts)
    groups = attempt.call(rank_groups, seed, counts)
    check_groups(groups, parameters)
    flats, changed = attempt.call(rank_flatten, seed, counts)
    check_flats(groups[: len(flats)], flats, parameters)
    if changed:
        raise Mistake(f"after flatten() a gradient is {changed}", SEE_BUCKETS)
    check_gradients(attempt.call(rank_unflatten, seed, counts), parameters)
    odd = odd_parameters(seed)
    groups, flats = attempt.call(rank_odd, seed)
    right = expected_groups(odd, LIMIT)
    if groups != right:
        kinds = [f"{str(each.dtype).removeprefix('torch.')} {each.numel()}" for each in odd]
        raise Mistake(
            f"for parameters of these types and elements: {', '.join(kinds)}, the groups are {groups}; with a limit of "
            f"{LIMIT} bytes they should be {right}: a group has one type, and an element has element_size() bytes",
            SEE_BUCKETS,
        )
    check_flats(groups, flats, odd)


def check_groups(groups: list[list[int]], parameters: Sequence[nn.Parameter]) -> None:
    """Raise unless the groups are the expected ones; name the rule that is broken."""
    flat = [number for group in groups for number in group]
    wanted = [number for number, parameter in enumerate(parameters) if parameter.requires_grad]
    if 1 in flat:
        raise Mistake("parameter 1 has requires_grad=False but is in a group: it never gets a gradient", SEE_BUCKETS)
    lost = sorted(set(wanted) - set(flat))
    if lost:
        size = parameters[lost[0]].numel() * parameters[lost[0]].element_size()
        why = f"it is larger than the limit of {LIMIT} and gets its own group" if size > LIMIT else "each counts"
        if parameters[lost[0]].grad is None:
            why = "its gradient is None here, but other ranks may have one, and all ranks need equal groups"
        if size <= LIMIT and parameters[lost[0]].grad is not None and lost == wanted[: len(lost)]:
            why = "the last group is lost: it is not full when the loop ends"
        raise Mistake(f"parameter {lost[0]} ({size} bytes) is in no group: {why}", SEE_BUCKETS)
    if len(flat) != len(set(flat)):
        raise Mistake(f"the groups {groups} hold a parameter twice", SEE_BUCKETS)
    if [] in groups:
        raise Mistake(f"the groups {groups} contain an empty one: it would cost a message without content", SEE_BUCKETS)
    if flat == wanted:
        raise Mistake(
            f"the groups {groups} are in order of registration; backward makes the last parameter's gradient first, so "
            "the last one comes first",
            SEE_BUCKETS,
        )
    for group in groups:
        members = [parameters[number] for number in group]
        size = sum(each.numel() * each.element_size() for each in members)
        if len({each.dtype for each in members}) > 1:
            raise Mistake(f"the group {group} mixes float32 and float64: one message has one type", SEE_BUCKETS)
        if size > LIMIT and len(group) > 1:
            elements = sum(each.numel() for each in members)
            why = f"; {elements} elements would fit, but the limit is in bytes" if elements <= LIMIT else ""
            raise Mistake(f"the group {group} has {size} bytes; the limit is {LIMIT}{why}", SEE_BUCKETS)
    right = expected_groups(parameters, LIMIT)
    if groups != right:
        sizes = [sum(parameters[number].numel() * parameters[number].element_size() for number in g) for g in groups]
        if sorted(map(sorted, groups)) == sorted(map(sorted, right)) or flat != [n for g in right for n in g]:
            raise Mistake(f"the groups are {groups}; in reverse order of registration they are {right}", SEE_BUCKETS)
        raise Mistake(
            f"the groups {groups} have {sizes} bytes; a group takes parameters as long as they fit into {LIMIT}, which "
            f"gives {right}",
            SEE_BUCKETS,
        )


def check_flats(groups: list[list[int]], flats: list[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Raise unless each flat tensor is the gradients of its group in order."""
    for index, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        members = [parameters[number] for number in group]
        size = sum(each.numel() for each in members)
        where = f"flatten({index}) of the parameters {group}"
        if flat.dim() != 1:
            raise Mistake(f"{where} has the shape {tuple(flat.shape)}; it should have one dimension", SEE_BUCKETS)
        if flat.numel() != size:
            none = [number for number in group if parameters[number].grad is None]
            why = f": the gradient of parameter {none[0]} is None and counts as zeros, since another rank may have it"
            raise Mistake(f"{where} has {flat.numel()} elements, not {size}{why if none else ''}", SEE_BUCKETS)
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in members]
        if flat.dtype != gradients[0].dtype:
            raise Mistake(f"{where} is {flat.dtype}; its gradients are {gradients[0].dtype}: keep the type")
        if not torch.equal(flat, torch.cat([each.reshape(-1) for each in gradients])):
            values = torch.cat([each.detach().reshape(-1) for each in members])
            if torch.equal(flat, values):
                raise Mistake(f"{where} holds the parameters' values: it should hold their gradients", SEE_BUCKETS)
            raise Mistake(f"{where} does not hold the gradients in the order of the group", SEE_BUCKETS)


def check_gradients(found: list[Tensor | None], parameters: Sequence[nn.Parameter]) -> None:
    """Raise unless each gradient is what was written back: twice the old one plus one."""
    for number, (gradient, parameter) in enumerate(zip(found, parameters, strict=True)):
        if not parameter.requires_grad:
            continue
        old = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        where = f"after unflatten the gradient of parameter {number}"
        if gradient is None:
            raise Mistake(
                f"{where} is still None: the average of the other ranks' gradients must get there", SEE_BUCKETS
            )
        if gradient.shape != parameter.shape:
            raise Mistake(f"{where} has the shape {tuple(gradient.shape)}, the parameter {tuple(parameter.shape)}")
        if not torch.allclose(gradient, 2 * old + 1, atol=1e-5):
            if torch.equal(gradient, old):
                raise Mistake(f"{where} is the old one: write the flat tensor's part into it", SEE_BUCKETS)
            if torch.allclose(gradient, 3 * old + 1, atol=1e-5):
                raise Mistake(f"{where} is the old one plus the new one: replace it, do not add", SEE_BUCKETS)
            raise Mistake(f"{where} has values of another place: look at where each part begins and ends", SEE_BUCKETS)


# --- overlap ----------------------------------------------------------------------------------------------------------

PAUSE = 0.02
MISSING = (
    "Some gradients do not come on rank 1: finish() must start the buckets that no hook has started, and count anew "
    "for the next step"
)


class Slow(torch.autograd.Function):
    """Nothing in forward, a pause in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Pass the tensor on."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Pass the gradient on, later."""
        time.sleep(PAUSE)
        return gradient


class Branches(nn.Module):
    """A head, two branches of equal size, a tail: the branches run in the order that the rank wants."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head, self.right, self.left, self.tail = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, inputs: Tensor, order: Sequence[str]) -> Tensor:
        """Return one number."""
        hidden = Slow.apply(self.head(inputs))
        branches = {name: Slow.apply(getattr(self, name)(hidden)) for name in order}
        return Slow.apply(self.tail(sum(branches[name] for name in sorted(branches)))).square().sum()


class Groups:
    """Buckets that a grader made: one per layer, the last layer first."""

    def __init__(self, model: Branches) -> None:
        self.groups = [list(layer.parameters()) for layer in (model.tail, model.left, model.right, model.head)]

    def flatten(self, index: int) -> Tensor:
        """Return the gradients of a group as one new tensor."""
        return torch.cat([(each.grad if each.grad is not None else torch.zeros_like(each)).reshape(-1)
                          for each in self.groups[index]]).detach().clone()  # fmt: skip

    def unflatten(self, index: int, flat: Tensor) -> None:
        """Write a tensor into the gradients of a group."""
        parts = flat.split([each.numel() for each in self.groups[index]])
        for parameter, part in zip(self.groups[index], parts, strict=True):
            parameter.grad = part.view(parameter.shape).clone()


def order_of(step: int, rank: int) -> tuple[str, ...]:
    """Return the branches of a step: equal, then in another order on rank 1, then one of them not used on rank 1."""
    if rank == 0 or step == 0:
        return ("right", "left")
    return ("left", "right") if step == 1 else ("left",)


def inputs_of(seed: int, step: int, rank: int) -> Tensor:
    """Return the batch of a rank."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed + 10 * step + rank))


def rank_overlap(module: ModuleType, rank: int, world: int, seed: int, steps: Sequence[int]) -> dict[str, Any]:
    """Train some steps with one OverlappedAverage; note when each backward ended, on the clock of the calls."""
    model = Branches(seed)
    groups = Groups(model)
    average = module.OverlappedAverage(groups)
    marks = []
    for _ in range(3):  # the first recorded calls: they tie this clock to that of the calls
        marks.append(time.monotonic())
        dist.barrier()
    gradients, ends = [], []
    for step in steps:
        model.zero_grad()
        model(inputs_of(seed, step, rank), order_of(step, rank)).backward()
        ends.append(time.monotonic())
        average.finish()
        gradients.append(
            [[None if each.grad is None else each.grad.clone() for each in group] for group in groups.groups]
        )
    return {"gradients": gradients, "ends": ends, "marks": marks}


def local_gradients(seed: int, step: int, rank: int) -> list[Tensor]:
    """Return one flat gradient per bucket, as one process computes it."""
    model = Branches(seed)
    groups = Groups(model)
    hidden = model.head(inputs_of(seed, step, rank))
    used = order_of(step, rank)
    model.tail(sum(getattr(model, name)(hidden) for name in sorted(used))).square().sum().backward()
    return [groups.flatten(index) for index in range(4)]


def grade_overlap(attempt: Attempt) -> None:
    """One step for values and times, then steps with other orders and with missing gradients."""
    seed = attempt.seed()
    hints = {
        (0,): "Each all_reduce needs the same one on the other rank",
        (0, 1): "The ranks' gradients come in different orders: start the buckets in one order, each once per step",
        (0, 2, 1): MISSING,
    }
    for world, (steps, hint) in zip((3, 2, 2), hints.items(), strict=True):
        answers = run_explained(attempt, rank_overlap, world, (seed, steps), waits=hint, sizes=hint, see=SEE_OVERLAP)
        for place, step in enumerate(steps):
            check_averages(answers, seed, place, step)
        check_times(answers, steps)


def check_averages(answers: Sequence[Answer], seed: int, place: int, step: int) -> None:
    """Raise unless every gradient is the mean over the ranks; say what it is instead."""
    world = len(answers)
    local = [local_gradients(seed, step, rank) for rank in range(world)]
    for answer in answers:
        rank, other = answer.rank, (answer.rank + 1) % world
        for index, group in enumerate(answer.value["gradients"][place]):
            if any(gradient is None for gradient in group):
                raise Mistake(f"step {place}: bucket {index} of rank {rank} has no gradient. {MISSING}", SEE_OVERLAP)
            found = torch.cat([gradient.reshape(-1) for gradient in group])
            mean = sum(each[index] for each in local) / world
            if torch.allclose(found, mean, rtol=1e-4, atol=1e-5):
                continue
            where = f"step {place}: bucket {index} of rank {rank} is"
            if torch.allclose(found, world * mean, rtol=1e-4, atol=1e-5):
                raise Mistake(
                    f"{where} the sum over the {world} ranks, not the mean: divide by the number of ranks", SEE_OVERLAP
                )
            if torch.allclose(found, world * mean / 2, rtol=1e-4, atol=1e-5):
                raise Mistake(f"{where} half of the sum; there are {world} ranks: dist.get_world_size()", SEE_OVERLAP)
            if torch.allclose(found, mean / world, rtol=1e-4, atol=1e-5):
                raise Mistake(
                    f"{where} the mean divided by the number of ranks again: it was divided twice", SEE_OVERLAP
                )
            if any(torch.allclose(found, local[rank][index] / k, rtol=1e-4, atol=1e-5) for k in (1, world)):
                raise Mistake(
                    f"{where} made of the rank's own gradient alone: write the sum back after wait(), in every step",
                    SEE_OVERLAP,
                )
            for strange in range(4):
                if local[other][strange].shape == found.shape and torch.allclose(
                    2 * found, local[rank][index] + local[other][strange], rtol=1e-4, atol=1e-5
                ):
                    raise Mistake(
                        f"{where} the mean of its own bucket {index} and of bucket {strange} of rank {other}: the "
                        "ranks started their buckets in different orders. Start bucket i only after buckets 0 to i - 1",
                        SEE_OVERLAP,
                    )
            raise Mistake(
                f"{where} not the mean of the ranks' gradients. Was the bucket flattened before all its gradients had "
                "come, or with those of the step before?",
                SEE_OVERLAP,
            )


def check_times(answers: Sequence[Answer], steps: Sequence[int]) -> None:
    """Raise unless buckets started during backward in every step, were waited for after it, and were one call each."""
    for answer in answers:
        calls = [call for call in answer.calls if call.line]
        # A rank can be paused between its mark and its call, never the other way: the smallest difference is the best.
        zero = min(call.start - mark for call, mark in zip(answer.calls, answer.value["marks"], strict=False))
        if any(call.kind != "all_reduce" for call in calls):
            kind = next(call for call in calls if call.kind != "all_reduce").kind
            raise Mistake(
                f"rank {answer.rank} calls {kind}; one all_reduce per bucket is all that is needed", SEE_OVERLAP
            )
        if len(calls) != 4 * len(steps):
            raise Mistake(
                f"rank {answer.rank} made {len(calls)} all_reduce calls in {len(steps)} step(s) with 4 buckets; one "
                "per bucket and step, when its last gradient has come",
                SEE_OVERLAP,
            )
        if any(call.end is None for call in calls):
            line = next(call for call in calls if call.end is None).line
            raise Mistake(
                f"the all_reduce of line {line} is never waited for: its result may not be there. Use work.wait() on "
                "what it returns (the future of a work is not seen here)",
                SEE_OVERLAP,
            )
        for place, step in enumerate(steps):
            needed = 3 if len(order_of(step, answer.rank)) == 2 else 2  # after a missing gradient, finish() starts it
            check_early(calls[4 * place : 4 * place + 4], answer.value["ends"][place] + zero, place, needed)


def check_early(calls: Sequence[Call], end: float, place: int, needed: int) -> None:
    """Raise unless enough buckets of one step started before its backward ended, without waiting for them there."""
    early = [call for call in calls if call.start < end]
    again = (
        f" in step {place}, though not in step 0: does finish() reset the counts for the next step?" if place else ""
    )
    if not early:
        raise Mistake(
            f"all buckets started after backward had ended: nothing overlaps{again or '.'} Start a bucket in the hook "
            "that completes it",
            SEE_OVERLAP,
        )
    if any(call.end < end - PAUSE / 4 for call in early if call.end is not None):
        raise Mistake(
            f"the hook waits for the all_reduce (line {early[0].line}): backward stands still meanwhile. Use "
            "async_op=True and wait in finish()",
            SEE_OVERLAP,
        )
    if len(early) < needed:
        raise Mistake(
            f"only {len(early)} of 4 buckets started before backward ended{again or ':'} Start each one in the hook "
            "that completes it",
            SEE_OVERLAP,
        )
