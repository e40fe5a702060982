"""Grade template_data_loader.py: samples and batches by rank; the background thread is in background_loader.py."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from grader.checks.background_loader import grade_load_in_background
from grader.exercise import Attempt, Exercise, Mistake

TEMPLATE = "phase1_data_parallel/template_data_loader.py"
SPLIT = "Split the samples over the ranks"
BATCHES = "Cut global batches into weighted parts"
BACKGROUND = "Load batches in the background"


# shard-indices -------------------------------------------------------------------------------------------------------


def call_shards(module: ModuleType, size: int, world: int, seed: int, epoch: int, shuffle: bool) -> dict[str, Any]:
    """Call shard_indices for every rank, each with another random state of the process, and once more for rank 0."""
    shards: list[Any] = []
    changed = False
    for rank in [*range(world), 0]:
        torch.manual_seed(1000 * seed + rank)
        random.seed(1000 * seed + rank)
        before = (torch.get_rng_state(), random.getstate())
        if len(shards) == world:
            torch.rand(5)
            random.random()
            before = (torch.get_rng_state(), random.getstate())
        shards.append(module.shard_indices(size, rank, world, seed=seed, epoch=epoch, shuffle=shuffle))
        changed |= not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()
    return {"shards": shards[:-1], "again": shards[-1], "changed": changed}


def call_all_shards(module: ModuleType, cases: list[tuple[int, int, int, int, bool]]) -> list[dict[str, Any]]:
    """Call shard_indices for all ranks of each case (size, world, seed, epoch, shuffle)."""
    return [call_shards(module, *case) for case in cases]


def call_orders(module: ModuleType, size: int, keys: list[tuple[int, int, int]]) -> list[list[int]]:
    """Return the shuffled order, put together from all ranks, for each key (world, seed, epoch)."""
    orders = []
    for world, seed, epoch in keys:
        shards = [module.shard_indices(size, rank, world, seed=seed, epoch=epoch) for rank in range(world)]
        orders.append([shards[position % world][position // world] for position in range(size)])
    return orders


def grade_shard_indices(attempt: Attempt) -> None:
    """Check order, padding and split for sizes that divide, that do not, and that are smaller than the world."""
    seed = attempt.seed() % 10_000
    world = 3 + seed % 2
    size = 8 * world
    cases = [
        (size, world, seed, 1, False),
        (size, world, seed, 1, True),
        (size, world, seed, 2, True),
        (size, world, seed + 17, 1, True),
        (size - 2, world, seed, 0, False),
        (size - 2, world, seed, 5, True),
        (2, 5, seed, 0, False),
        (2, 5, seed, 3, True),
    ]
    results = attempt.call(call_all_shards, cases)
    for number, (case, result) in enumerate(zip(cases, results, strict=True)):
        if number == 4:
            check_epochs(cases, [each["shards"] for each in results[:4]])
        check_shards(case, result)
    epochs = [*range(8), 10, 11, *random.Random(seed).sample(range(12, 1000), 4)]
    seeds = [seed, seed + 1, seed + 2, seed + 8, seed + 10, seed + 1000, 2 * seed + 4, seed + 2**16]
    for key in ("epoch", "seed"):
        keys = [(world, seed, epoch) for epoch in epochs] if key == "epoch" else [(world, other, 0) for other in seeds]
        check_orders(key, keys, attempt.call(call_orders, size, keys))
    keys = [(other, seed, 1) for other in (1, 2, world, 5)]
    orders = attempt.call(call_orders, size, keys)
    for (other, _, _), order in zip(keys, orders, strict=True):
        if order != orders[0]:
            raise Mistake(
                f"{size} samples, seed {seed}, epoch 1: with {other} ranks the order begins {order[:5]}, with one rank "
                f"{orders[0][:5]}. It must depend on seed and epoch alone, not on the number of ranks.",
                see=SPLIT,
            )


def check_orders(key: str, keys: list[tuple[int, int, int]], orders: list[list[int]]) -> None:
    """Raise a Mistake unless keys that differ in the seed alone, or in the epoch alone, have different orders."""
    seen: dict[tuple[int, ...], int] = {}
    for (_, seed, epoch), order in zip(keys, orders, strict=True):
        value = epoch if key == "epoch" else seed
        fixed = f"with seed {seed}" if key == "epoch" else f"in epoch {epoch}"
        first = order.index(0)
        turned = tuple(order[first:] + order[:first])  # of all rotations of one order, the one that begins with 0
        if turned in seen:
            other = seen[turned]
            same = orders[[pair[1:][key == "epoch"] for pair in keys].index(other)] == order
            how = "have the same order" if same else "have one order, rotated: the neighbours never change"
            raise Mistake(
                f"The {key}s {other} and {value} {how}, {fixed}. Two {key}s must never share an order by design: make "
                f"the number that seeds the shuffle so that it differs whenever the {key} does.",
                see=SPLIT,
            )
        seen[turned] = value


def check_shards(case: tuple[int, int, int, int, bool], result: dict[str, Any]) -> None:
    """Raise a Mistake unless the shards of one case are a padded split of one order."""
    size, world, _, _, shuffle = case
    shards = result["shards"]
    where = f"{size} samples, {world} ranks, shuffle={shuffle}"
    if not all(isinstance(shard, list) and all(type(index) is int for index in shard) for shard in shards):
        raise Mistake(f"shard_indices returned {shards[0]!r} for rank 0; it should be a list of ints.", see=SPLIT)
    if result["changed"]:
        raise Mistake(
            "shard_indices changes the random state of the process: the weights and dropout that come later would "
            "depend on it. Draw from your own torch.Generator.",
            see=SPLIT,
        )
    if result["again"] != shards[0]:
        raise Mistake(
            f"{where}: rank 0 got {shards[0][:4]}... and, called again, {result['again'][:4]}...: the order uses the "
            "random state of the process, which differs between ranks. It must depend on seed and epoch alone.",
            see=SPLIT,
        )
    check_lengths(where, size, world, shards)
    flat = [index for shard in shards for index in shard]
    expected = [[index % size for index in range(rank, len(flat), world)] for rank in range(world)]
    if not shuffle and shards != expected:
        raise Mistake(f"{where}: {explain_plain(size, world, shards, expected)}", see=SPLIT)
    order = [shards[position % world][position // world] for position in range(len(flat))]
    if set(flat) != set(range(size)):
        lost = sorted(set(range(size)) - set(flat))
        raise Mistake(
            f"{where}: no rank reads the samples {lost[:5]}, others are read by several ranks: the ranks shuffle "
            "differently. Leave the rank out of the seed: all ranks need the same order before they split it.",
            see=SPLIT,
        )
    if shuffle and (sorted(order[:size]) != list(range(size)) or order[size:] != (order * world)[: len(order) - size]):
        raise Mistake(
            f"{where}: put together, the ranks read {order}. The padding (the last {len(order) - size}) should repeat "
            "the beginning of the shuffled order: shuffle first, pad then, split last.",
            see=SPLIT,
        )


def check_lengths(where: str, size: int, world: int, shards: list[list[int]]) -> None:
    """Raise a Mistake unless all ranks have ceil(size / world) samples."""
    lengths = [len(shard) for shard in shards]
    expected = -(-size // world)
    if lengths == [expected] * world:
        return
    if len(set(lengths)) > 1:
        text = (
            f"the ranks get {lengths} samples: a rank with one more waits for ever in the all-reduce of its last step. "
            "Pad the order to a multiple of the number of ranks"
        )
        text += ", repeating it as often as needed." if size < world else "."
    elif lengths[0] == size // world:
        text = f"each rank gets {lengths[0]} samples: the last {size % world} samples are lost. Pad instead of cutting."
    elif lengths[0] >= size:
        text = f"each rank gets all {size} samples: each should get {expected} of them."
    else:
        text = f"each rank gets {lengths[0]} samples; it should be {expected} (the size / ranks, rounded up)."
    raise Mistake(f"{where}: {text}", see=SPLIT)


def explain_plain(size: int, world: int, shards: list[list[int]], expected: list[list[int]]) -> str:
    """Say how the split without shuffling differs from the stated one."""
    per_rank = len(expected[0])
    blocks = [[index % size for index in range(rank * per_rank, (rank + 1) * per_rank)] for rank in range(world)]
    seen = f"rank 1 got {shards[1]}, expected {expected[1]}"
    if shards == blocks:
        return f"{seen}. You give each rank a block of the order; rank r takes the positions r, r + world, ..."
    order = [shards[position % world][position // world] for position in range(per_rank * world)]
    if order[:size] == list(range(size)):
        return f"{seen}. The padding should be the first samples of the order again, not {order[size:]}."
    if sorted(order[:size]) == list(range(size)) and size > world:
        return f"{seen}. The order is shuffled although shuffle is False."
    return f"{seen}."


def check_epochs(cases: list[tuple[int, int, int, int, bool]], results: list[list[list[int]]]) -> None:
    """Raise a Mistake unless the order changes with the epoch and with the seed."""
    plain, first, next_epoch, next_seed = results
    if first == plain:
        raise Mistake(
            "With shuffle=True the samples still come in the order 0, 1, 2, ...: nothing is shuffled.", see=SPLIT
        )
    if first == next_epoch:
        raise Mistake(
            f"Epochs {cases[1][3]} and {cases[2][3]} have the same order: the epoch is not part of the seed of the "
            "shuffle, so all epochs see the same batches.",
            see=SPLIT,
        )
    if first == next_seed:
        raise Mistake("Two different seeds give the same order: the seed is not used.", see=SPLIT)
    if set(first[0]) == set(next_epoch[0]):
        raise Mistake(
            "Rank 0 reads the same samples in each epoch, only in another order: you shuffle inside the share of a "
            "rank. Shuffle the order of all samples before you split it.",
            see=SPLIT,
        )


# shard-batches -------------------------------------------------------------------------------------------------------


def call_all_batches(module: ModuleType, order: Sequence[int], world: int, size: int) -> list[list[tuple[Any, Any]]]:
    """Return the (indices, weight) of all batches of each rank."""
    ranks = range(world)
    batches = [module.shard_batches(order, rank, world, global_batch=size) for rank in ranks]
    return [[(batch.indices, batch.weight) for batch in of_rank] for of_rank in batches]


def grade_shard_batches(attempt: Attempt) -> None:
    """Check ragged global batches of several sizes, among them one that leaves a rank without samples."""
    seed = attempt.seed()
    draw = random.Random(seed)
    whole = draw.randint(2, 4)
    cases = ((3, 6, whole, 0), (3, 7, whole, 4), (4, 6, whole, 5), (4, 9, whole, 2), (4, 3, whole, 1), (5, 8, 0, 3))
    for number, (world, global_batch, batches_before, rest) in enumerate(cases):
        length = global_batch * batches_before + rest
        order: Sequence[int] = [10 * index + 3 for index in draw.sample(range(length), length)]
        if number == 2:
            order = range(length)  # any sequence of ints will do
        batches = attempt.call(call_all_batches, order, world, global_batch)
        kinds = {type(indices) for of_rank in batches for indices, _ in of_rank} - {list}
        if kinds:
            raise Mistake(
                f"order is a {type(order).__name__} here, and the indices of a Batch are a {kinds.pop().__name__}: "
                "they should be a list of ints.",
                see=BATCHES,
            )
        check_batches(list(order), global_batch, batches)


def check_batches(order: list[int], global_batch: int, batches: list[list[tuple[list[int], float]]]) -> None:
    """Raise a Mistake unless the parts of all ranks cover each global batch evenly and have the right weights."""
    world = len(batches)
    where = f"{len(order)} samples, global batches of {global_batch}, {world} ranks"
    steps = [len(of_rank) for of_rank in batches]
    if len(set(steps)) > 1:
        raise Mistake(
            f"{where}: the ranks have {steps} batches. The ranks with more wait for ever in an all-reduce: a rank "
            "without samples in a step needs an empty batch.",
            see=BATCHES,
        )
    check_coverage(where, order, global_batch, batches)
    for step in range(steps[0]):
        samples = order[step * global_batch : (step + 1) * global_batch]
        check_step(f"{where}, step {step}", samples, [of_rank[step] for of_rank in batches], global_batch)


def check_coverage(where: str, order: list[int], size: int, batches: list[list[tuple[list[int], float]]]) -> None:
    """Raise a Mistake unless every sample of the order occurs exactly once in the epoch."""
    counts = Counter(index for of_rank in batches for indices, _ in of_rank for index in indices)
    foreign = sorted(set(counts) - set(order))
    if foreign:
        raise Mistake(
            f"{where}: the batches hold {foreign[:4]}, which are not in `order`. They look like positions: return the "
            "entries of `order` at these positions.",
            see=BATCHES,
        )
    repeated = [index for index in order if counts[index] > 1]
    if repeated and all(counts[index] == len(batches) for index in order):
        raise Mistake(f"{where}: every rank has all samples of a step. Each sample belongs to one rank.", see=BATCHES)
    if repeated:
        raise Mistake(
            f"{where}: the samples {repeated[:4]} occur twice. Nothing is padded here: a short batch stays short.",
            see=BATCHES,
        )
    lost = [index for index in order if not counts[index]]
    tail = len(order) % size
    if lost and lost == order[len(order) - tail :]:
        raise Mistake(f"{where}: the last {tail} samples are lost: the last global batch may be short.", see=BATCHES)
    if lost:
        raise Mistake(
            f"{where}: {len(lost)} samples are in no batch, the first in step {order.index(lost[0]) // size}: the "
            "remainder of samples / ranks is lost. Some ranks take one more.",
            see=BATCHES,
        )


def check_step(where: str, samples: list[int], parts: list[tuple[list[int], float]], global_batch: int) -> None:
    """Raise a Mistake unless the parts of one step are even and weighted by their samples."""
    lengths = [len(indices) for indices, _ in parts]
    if {index for indices, _ in parts for index in indices} != set(samples):
        raise Mistake(
            f"{where}: the ranks together hold {sum(lengths)} samples, and not the {len(samples)} that belong to this "
            "step: global_batch counts the samples of all ranks. Cut the order into global batches first, each of "
            "them into parts then.",
            see=BATCHES,
        )
    if max(lengths) - min(lengths) > 1:
        raise Mistake(
            f"{where}: the ranks have {lengths} samples: the others wait for the longest part. Lengths may differ by "
            "one at most.",
            see=BATCHES,
        )
    weights = [float(weight) for _, weight in parts]
    expected = [length / len(samples) for length in lengths]
    if max(abs(weight - right) for weight, right in zip(weights, expected, strict=True)) < 1e-9:
        return
    shown = [round(weight, 4) for weight in weights]
    hint = f"they should be {[round(weight, 4) for weight in expected]}."
    if weights == [1 / len(parts)] * len(parts):
        hint = f"all ranks count alike although they have {lengths} samples."
    elif weights == lengths:
        hint = "these are numbers of samples: divide by the samples of the global batch."
    elif all(abs(weight - length / global_batch) < 1e-9 for weight, length in zip(weights, lengths, strict=True)):
        hint = (
            f"they add up to {sum(weights):.3f}: this global batch has {len(samples)} samples, not {global_batch}; "
            "divide by the length of the short batch."
        )
    elif abs(sum(weights) - 1) > 1e-9:
        hint = f"they add up to {sum(weights):.3f}; the sum over the ranks should be 1: {expected}."
    raise Mistake(f"{where}: the weights are {shown} for {lengths} samples: {hint}", see=BATCHES)


EXERCISES = (
    Exercise(
        name="shard-indices",
        title=SPLIT,
        template=TEMPLATE,
        target="shard_indices",
        points=10,
        grade=grade_shard_indices,
        forbidden=("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"),
    ),
    Exercise(
        name="shard-batches",
        title=BATCHES,
        template=TEMPLATE,
        target="shard_batches",
        points=10,
        grade=grade_shard_batches,
    ),
    Exercise(
        name="load-in-background",
        title=BACKGROUND,
        template=TEMPLATE,
        target="BackgroundLoader",
        points=15,
        grade=grade_load_in_background,
        forbidden=("torch.utils.data.DataLoader",),
    ),
)
