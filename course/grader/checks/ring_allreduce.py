"""Graders of template_ring_allreduce.py: the ring itself. Buckets and topology are graded in two files beside this."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from grader.checks.ring_buckets import grade_buckets, grade_overlap
from grader.checks.ring_topology import grade_hierarchical, grade_order
from grader.checks.talk import COLLECTIVES, check_peers, check_waited, check_wire, run_explained
from grader.exercise import Attempt, Exercise, Mistake
from grader.ranks import Answer

TEMPLATE = "phase3_multi_node/template_ring_allreduce.py"
BLOCKED = (
    "A blocking send returns only when the other rank receives: if every rank of a ring sends first, no rank receives. "
    "Use isend, or let even positions send first and odd ones receive first"
)
UNPAIRED = (
    "Each send needs its receive on the next rank: all ranks of the ring do n - 1 steps, one send and one receive each"
)
UNEQUAL = (
    "Often a message had another size than the tensor that received it: the chunk that a rank receives must be the one "
    "that the rank before it sends in this step. Look at the numbers of the chunks and at the directions"
)


def numbers(seed: int, rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return whole numbers, which sum up without rounding; different for each rank."""
    generator = torch.Generator().manual_seed(seed + rank)
    if dtype == torch.bfloat16:
        return torch.randint(1, 17, (size,), generator=generator).to(dtype)
    low = 2**40 if dtype == torch.int64 else 1
    return torch.randint(low, low + 5000, (size,), generator=generator).to(dtype)


def chunks_of(flat: Tensor, count: int) -> list[Tensor]:
    """Return the chunks as the template defines them."""
    return list(flat.tensor_split(count))


def explain(found: Tensor, parts: Sequence[Tensor]) -> str:
    """Say which ranks' parts a chunk is the sum of, or return nothing."""
    stacked = torch.stack(list(parts)).double()
    for counts in itertools.product(range(9), repeat=len(parts)):
        if torch.equal(found.double(), torch.tensor(counts, dtype=torch.float64) @ stacked):
            terms = [f"{f'{count} x ' if count > 1 else ''}rank {rank}" for rank, count in enumerate(counts) if count]
            return " + ".join(terms) or "zeros"
    return ""


def run(attempt: Attempt, function: Callable[..., Any], *arguments: object, ranks: int) -> list[Answer]:
    """Run ranks; say what a deadlock of a ring comes from."""
    return run_explained(
        attempt,
        function,
        ranks,
        arguments,
        waits=UNPAIRED,
        sizes=UNEQUAL,
        errors={"waits in send": BLOCKED},
        timeout=20.0,
        see="Two cures for the deadlock",
    )


# --- reduce-scatter ---------------------------------------------------------------------------------------------------


def argument(ring: Sequence[int]) -> list[Sequence[int]]:
    """Return what to hand over for a ring: nothing for that of all ranks in order, which is the default."""
    return [] if list(ring) == sorted(ring) else [ring]


def cases_of_sizes(attempt: Attempt) -> list[tuple[Sequence[int], list[int]]]:
    """Return (sizes of tensors, ring): sizes with and without equal chunks, then a ring in another order."""
    ranks, dice = attempt.random.choice((3, 4)), attempt.random
    order = list(range(ranks))
    other = dice.choice([list(each) for each in itertools.permutations(order) if successors(each) != successors(order)])
    sizes = [ranks * dice.randint(3, 9) for _ in range(3)]
    return [((sizes[0],), order), ((sizes[1] + 1, 2), order), ((sizes[2],), other)]


def successors(ring: Sequence[int]) -> dict[int, int]:
    """Return the next rank of each rank of a ring."""
    return {rank: ring[(place + 1) % len(ring)] for place, rank in enumerate(ring)}


def rank_reduce_scatter(
    module: ModuleType, rank: int, world: int, seed: int, sizes: Sequence[int], ring: Sequence[int]
) -> list[Tensor]:
    """Reduce-scatter tensors of several sizes."""
    tensors = [numbers(seed, rank, size) for size in sizes]
    for tensor in tensors:
        module.ring_reduce_scatter(tensor, *argument(ring))
    return tensors


def grade_reduce_scatter(attempt: Attempt) -> None:
    """Check which chunk is whole on which rank, and the bytes."""
    for sizes, ring in cases_of_sizes(attempt):
        check_reduce_scatter(attempt, sizes, ring)


def check_reduce_scatter(attempt: Attempt, sizes: Sequence[int], ring: Sequence[int]) -> None:
    """Run some sizes and check them."""
    seed, ranks = attempt.seed(), len(ring)
    answers = run(attempt, rank_reduce_scatter, seed, sizes, ring, ranks=ranks)
    check_peers(answers, ring)
    for index, size in enumerate(sizes):
        parts = [chunks_of(numbers(seed, rank, size), ranks) for rank in range(ranks)]
        for answer in answers:
            check_reduced(answer.rank, answer.value[index], parts, ring)
    check_wire(answers, len(sizes) * (ranks - 1), sum(4 * size * (ranks - 1) for size in sizes))


def check_reduced(rank: int, flat: Tensor, parts: Sequence[Sequence[Tensor]], ring: Sequence[int]) -> None:
    """Raise unless the chunk of this rank is the whole sum; say what it is instead."""
    world = len(parts)
    mine = (ring.index(rank) + 1) % world
    found = chunks_of(flat, world)
    sums = [sum(part[chunk] for part in parts) for chunk in range(world)]
    if torch.equal(found[mine], sums[mine]):
        return
    where = f"after the reduce-scatter of {flat.numel()} elements over {world} ranks"
    where += "" if not argument(ring) else f" in the ring {list(ring)}"
    should = f"it should hold chunk {mine}, (position + 1) % ranks"
    if torch.equal(found[mine] * world, sums[mine]):
        raise Mistake(f"{where}, chunk {mine} of rank {rank} is the mean; it should be the sum: do not divide")
    whole = [chunk for chunk in range(world) if torch.equal(found[chunk], sums[chunk]) and found[chunk].numel()]
    if whole:
        raise Mistake(
            f"rank {rank} holds the whole chunk {whole[0]} {where}; {should}: look at which chunk you send first",
            see="Sum in a ring (reduce-scatter)",
        )
    if torch.equal(found[mine], parts[rank][mine]):
        raise Mistake(
            f"{where}, chunk {mine} of rank {rank} is still its own part alone: nothing was added to it. "
            "Add what you receive to a view of the tensor, not to a copy, and do n - 1 steps"
        )
    seen = explain(found[mine], [part[mine] for part in parts])
    lost = "" if not seen or f"rank {rank}" in seen else " Its own part is lost: receive into a new tensor and add it."
    raise Mistake(
        f"{where}, chunk {mine} of rank {rank} is {seen or 'not a sum of one part of each rank'}; it should "
        f"be the sum over all {world} ranks.{lost} Look at which chunk you send, which one you add to, and the number "
        "of steps",
        see="Sum in a ring (reduce-scatter)",
    )


# --- all-gather -------------------------------------------------------------------------------------------------------


def prepared(seed: int, rank: int, ring: Sequence[int], size: int) -> Tensor:
    """Return a tensor in which only chunk (position + 1) % ranks is finished."""
    flat = torch.full((size,), -1000.0 * (rank + 1))
    mine = (ring.index(rank) + 1) % len(ring)
    chunks_of(flat, len(ring))[mine].copy_(chunks_of(numbers(seed, 0, size), len(ring))[mine])
    return flat


def rank_all_gather(
    module: ModuleType, rank: int, world: int, seed: int, sizes: Sequence[int], ring: Sequence[int]
) -> list[Tensor]:
    """All-gather tensors of several sizes."""
    tensors = [prepared(seed, rank, ring, size) for size in sizes]
    for tensor in tensors:
        module.ring_all_gather(tensor, *argument(ring))
    return tensors


def grade_all_gather(attempt: Attempt) -> None:
    """Check every chunk on every rank, and the bytes."""
    for sizes, ring in cases_of_sizes(attempt):
        check_all_gather(attempt, sizes, ring)


def check_all_gather(attempt: Attempt, sizes: Sequence[int], ring: Sequence[int]) -> None:
    """Run some sizes and check them."""
    seed, ranks = attempt.seed(), len(ring)
    answers = run(attempt, rank_all_gather, seed, sizes, ring, ranks=ranks)
    check_peers(answers, ring)
    for index, size in enumerate(sizes):
        whole = chunks_of(numbers(seed, 0, size), ranks)
        for answer in answers:
            check_gathered(answer.rank, answer.value[index], whole, ring)
    check_wire(answers, len(sizes) * (ranks - 1), sum(4 * size * (ranks - 1) for size in sizes))


def check_gathered(rank: int, flat: Tensor, whole: Sequence[Tensor], ring: Sequence[int]) -> None:
    """Raise unless all chunks are the finished ones."""
    world = len(whole)
    for number, (chunk, right) in enumerate(zip(chunks_of(flat, world), whole, strict=True)):
        if torch.equal(chunk, right):
            continue
        if number == (ring.index(rank) + 1) % world:
            raise Mistake(
                f"rank {rank} began with chunk {number} finished and no longer has it: what it received went into the "
                "wrong chunk, or was added to it. Look at which chunk you receive in step 0",
                see="Share the finished chunks (all-gather)",
            )
        if (chunk == -1000.0 * (rank + 1)).all():
            missing = "was never received (it still has its old content)"
        elif torch.equal(chunk, right - 1000.0 * (rank + 1)):
            missing = "was added to the old content; here a chunk is copied, nothing is added"
        elif (chunk < 0).all():
            missing = "has the unfinished content of another rank: a chunk was passed on before it was finished here"
        else:
            others = [other for other in range(world) if torch.equal(chunk, whole[other][: chunk.numel()])]
            missing = f"holds chunk {others[0]}" if others else "holds other values"
        raise Mistake(
            f"after the all-gather of {flat.numel()} elements over {world} ranks, chunk {number} of rank {rank} "
            f"{missing}. In step s a rank sends chunk (position + 1 - s) % n; n - 1 steps",
            see="Share the finished chunks (all-gather)",
        )


# --- all-reduce -------------------------------------------------------------------------------------------------------


def cases(seed: int, rank: int, extra: int) -> list[Tensor]:
    """Return tensors of several sizes, shapes, types and layouts."""
    return [
        numbers(seed, rank, 12 + extra),
        numbers(seed + 10, rank, 2, torch.int64),
        numbers(seed + 20, rank, 15, torch.float64).view(5, 3).t(),
        numbers(seed + 30, rank, 8 + extra, torch.bfloat16),
    ]


def rank_all_reduce(
    module: ModuleType, rank: int, world: int, seed: int, extra: int, ring: Sequence[int]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """All-reduce every case over all ranks, one over a given ring, one over this rank alone."""
    tensors = [*cases(seed, rank, extra), numbers(seed + 40, rank, 7), numbers(seed + 50, rank, 3)]
    rings = [*[None] * (len(tensors) - 2), ring, [rank]]
    results = [
        module.ring_all_reduce(tensor, *([] if order is None else [order]))
        for tensor, order in zip(tensors, rings, strict=True)
    ]
    return tensors, results


def grade_all_reduce(attempt: Attempt) -> None:
    """Check values, types, layouts, rings, messages and bytes."""
    ranks, extra, seed = 3, attempt.random.choice((1, 2)), attempt.seed()
    ring = attempt.random.choice(([0, 2, 1], [2, 1, 0], [1, 0, 2]))
    answers = run(attempt, rank_all_reduce, seed, extra, ring, ranks=ranks)
    sources = [[*cases(seed, rank, extra), numbers(seed + 40, rank, 7)] for rank in range(ranks)]
    for answer in answers:
        found, results = answer.value
        for index, tensor in enumerate(found[:-1]):
            order = ring if index == len(found) - 2 else range(ranks)
            check_sum(answer.rank, tensor, [source[index] for source in sources], order, results[index])
        if not torch.equal(found[-1], numbers(seed + 50, answer.rank, 3)):
            raise Mistake(
                f"ring=[{answer.rank}] was given, but the tensor of rank {answer.rank} changed: the sum over one rank "
                "is the tensor itself. Hand `ring` on to both halves"
            )
    check_all_reduce_wire(answers, sources[0], ring)


def check_sum(rank: int, found: Tensor, parts: Sequence[Tensor], ring: Sequence[int], result: Tensor | None) -> None:
    """Raise unless the tensor is the sum of the parts; say what it is instead."""
    right = torch.stack(list(parts)).sum(0).to(found.dtype)
    if torch.equal(found, right):
        return
    world = len(parts)
    what = f"a {str(found.dtype).removeprefix('torch.')} tensor of shape {tuple(found.shape)}"
    what += "" if found.is_contiguous() else " that is not contiguous"
    what += "" if list(ring) == list(range(world)) else f" over the ring {list(ring)}"
    where = f"ring_all_reduce of {what}: on rank {rank}"
    if torch.equal(found, parts[rank]):
        why = "the result was returned, but" if result is not None else ""
        raise Mistake(f"{where} {why} the tensor did not change: write the sum into it with copy_()".replace("  ", " "))
    if torch.equal((found * world).to(right.dtype), right):
        raise Mistake(f"{where} the result is the mean; it should be the sum over the {world} ranks")
    seen = explain(found, parts)
    if seen:
        raise Mistake(f"{where} the result is {seen}; it should be the sum over the {world} ranks, each once")
    flat, own = found.reshape(-1), parts[rank].reshape(-1)
    same = flat != right.reshape(-1)
    if torch.equal(flat[same], own[same]) and same[-1]:
        raise Mistake(f"{where} the last {int(same.sum())} elements did not change: chunks must cover the whole tensor")
    pairs = zip(chunks_of(flat, world), chunks_of(right.reshape(-1), world), strict=True)
    good = [number for number, (one, two) in enumerate(pairs) if torch.equal(one, two)]
    if good == [(list(ring).index(rank) + 1) % world]:
        raise Mistake(f"{where} only chunk {good[0]} is the whole sum: the all-gather that follows is missing or wrong")
    if found.dtype in (torch.int64, torch.bfloat16) and torch.allclose(found.double(), right.double(), rtol=0.05):
        raise Mistake(f"{where} the sum is rounded: keep the tensor's own type all the way")
    raise Mistake(f"{where} the result is {flat.tolist()[:6]}; it should be {right.reshape(-1).tolist()[:6]}")


def check_all_reduce_wire(answers: Sequence[Answer], tensors: Sequence[Tensor], ring: Sequence[int]) -> None:
    """Check peers, number and bytes of the messages, and their types."""
    check_waited(answers)
    world = len(answers)
    total = sum(2 * (world - 1) * tensor.numel() * tensor.element_size() for tensor in tensors)
    for answer in answers:
        sends = [call for call in answer.calls if call.is_send]
        following = {(answer.rank + 1) % world, ring[(ring.index(answer.rank) + 1) % world]}
        strange = next((call for call in sends if call.peer not in following), None)
        if strange is not None:
            raise Mistake(
                f"rank {answer.rank} sends to rank {strange.peer} (line {strange.line}): in the ring it sends only to "
                f"the next rank. Hand `ring` on to both halves"
            )
        last = [call for call in sends if call.dtype == "float32"][-1:]
        if last and last[0].peer != ring[(ring.index(answer.rank) + 1) % world]:
            raise Mistake(
                f"ring={list(ring)} was given, but rank {answer.rank} sends to rank {last[0].peer}. Hand `ring` on to "
                "both halves"
            )
        missing = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors} - {call.dtype for call in sends}
        if missing:
            raise Mistake(f"a {min(missing)} tensor travelled as another type: send it in its own type")
        if len(sends) > 2 * (world - 1) * len(tensors):
            raise Mistake(
                f"rank {answer.rank} sent {len(sends)} messages for {len(tensors)} tensors; 2 (n - 1) each are enough"
            )
    sent = sum(answer.sent for answer in answers)
    if sent != total:
        raise Mistake(
            f"the {world} ranks sent {sent} bytes in all; a ring needs {total}, 2 (n - 1) / n of the tensor per rank: "
            "send one chunk per step, not the whole tensor",
            see="Why chunks: the bytes",
        )


EXERCISES = (
    Exercise(
        name="ring-reduce-scatter",
        title="Sum in a ring (reduce-scatter)",
        template=TEMPLATE,
        target="ring_reduce_scatter",
        points=15,
        grade=grade_reduce_scatter,
        forbidden=COLLECTIVES,
    ),
    Exercise(
        name="ring-all-gather",
        title="Share the finished chunks (all-gather)",
        template=TEMPLATE,
        target="ring_all_gather",
        points=10,
        grade=grade_all_gather,
        forbidden=COLLECTIVES,
    ),
    Exercise(
        name="ring-all-reduce",
        title="The whole ring all-reduce",
        template=TEMPLATE,
        target="ring_all_reduce",
        points=10,
        grade=grade_all_reduce,
        forbidden=COLLECTIVES,
    ),
    Exercise(
        name="buckets",
        title="Gradients in buckets",
        template=TEMPLATE,
        target="Buckets",
        points=10,
        grade=grade_buckets,
    ),
    Exercise(
        name="overlap",
        title="Communicate while backward runs",
        template=TEMPLATE,
        target="OverlappedAverage",
        points=20,
        grade=grade_overlap,
        forbidden=("torch.nn.parallel.DistributedDataParallel",),
    ),
    Exercise(
        name="ring-order",
        title="A ring that follows the links",
        template=TEMPLATE,
        target="ring_order",
        points=10,
        grade=grade_order,
    ),
    Exercise(
        name="hierarchical-all-reduce",
        title="Inside the host first",
        template=TEMPLATE,
        target="hierarchical_all_reduce",
        points=15,
        grade=grade_hierarchical,
        forbidden=COLLECTIVES,
    ),
)
