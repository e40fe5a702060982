"""Wrong and other right answers of template_data_loader.py."""

from __future__ import annotations

from wrong import Right, Wrong

SEEDED = "generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)"
PERMUTED = "order = torch.randperm(size, generator=generator).tolist()"
PER_RANK = "per_rank = (size + world - 1) // world"
PADDED = "padded = [order[position % size] for position in range(per_rank * world)]"
SPLIT = "return padded[rank::world]"

STARTS = "for start in range(0, len(order), global_batch):"
SAMPLES = "samples = order[start : start + global_batch]"
FIRST = "first = len(samples) * rank // world"
LAST = "last = len(samples) * (rank + 1) // world"
PART = "part = list(samples[first:last])"
APPEND = "batches.append(Batch(part, len(part) / len(samples)))"

PASS = """        finished: queue.Queue[Tensor | Exception | None] = queue.Queue()"""
LOADED = "finished.put(self.load(indices))"
CAUGHT = """                    finished.put(error)
                    return
            finished.put(None)"""
RAISED = """                if isinstance(item, Exception):
                    raise item
"""
WAIT = """                free.acquire()
                if stopped.is_set():
                    return
"""
END = """            stopped.set()
            free.release()
            thread.join()"""

WRONG = (
    Wrong(
        "shard-indices",
        "global random state",
        ((SEEDED, ""), (PERMUTED, "order = torch.randperm(size).tolist()")),
        says="changes the random state",
        fast=True,
    ),
    Wrong(
        "shard-indices",
        "global seed set",
        ((SEEDED, "torch.manual_seed(seed + epoch)"), (PERMUTED, "order = torch.randperm(size).tolist()")),
        says="changes the random state",
    ),
    Wrong(
        "shard-indices",
        "seed of the process",
        ((SEEDED, "generator = torch.Generator().manual_seed(torch.initial_seed() + seed + epoch)"),),
        says="the ranks shuffle differently",
    ),
    Wrong(
        "shard-indices",
        "random state of the process read",
        ((SEEDED, "generator = torch.Generator(); generator.set_state(torch.get_rng_state())"),),
        says="uses the random state of the process",
    ),
    Wrong("shard-indices", "rank in the seed", ((SEEDED, SEEDED[:-1] + " + rank)"),), says="Leave the rank out of the"),
    Wrong(
        "shard-indices",
        "epoch ignored",
        ((SEEDED, SEEDED.replace(" + epoch", "")),),
        says="epoch is not part",
        fast=True,
    ),
    Wrong(
        "shard-indices", "seed ignored", ((SEEDED, SEEDED.replace("seed * 1_000_003 + ", "")),), says="seed is not used"
    ),
    Wrong("shard-indices", "tail dropped", ((PER_RANK, "per_rank = size // world"),), says="samples are lost"),
    Wrong("shard-indices", "no padding", ((PADDED, "padded = order"),), says="waits for ever in the all-reduce"),
    Wrong(
        "shard-indices",
        "padded with the last sample",
        ((PADDED, "padded = order + [order[-1]] * (per_rank * world - size)"),),
        says="The padding should be the first samples",
    ),
    Wrong(
        "shard-indices",
        "order not repeated for few samples",
        ((PADDED, "padded = order + order[: per_rank * world - size]"),),
        says="repeating it as often as needed",
    ),
    Wrong(
        "shard-indices",
        "blocks",
        ((SPLIT, "return padded[rank * per_rank : (rank + 1) * per_rank]"),),
        says="a block of the order",
    ),
    Wrong(
        "shard-indices", "always shuffled", (("    if shuffle:\n", "    if True:\n"),), says="although shuffle is False"
    ),
    Wrong("shard-indices", "never shuffled", (("    if shuffle:\n", "    if False:\n"),), says="nothing is shuffled"),
    Wrong(
        "shard-indices",
        "shuffle inside the share",
        (
            (PERMUTED, "order = list(range(size))"),
            (SEEDED, "generator = torch.Generator().manual_seed(seed + 31 * epoch)"),
            (
                SPLIT,
                "mine = padded[rank::world]\n"
                "    return [mine[i] for i in torch.randperm(per_rank, generator=generator)] if shuffle else mine",
            ),
        ),
        says="inside the share of a rank",
    ),
    Wrong(
        "shard-indices",
        "padded before shuffling",
        (
            (PERMUTED, "order = list(range(size))"),
            (
                SPLIT,
                "if shuffle:\n        padded = [padded[i] for i in torch.randperm(len(padded), generator=generator)]\n"
                "    return padded[rank::world]",
            ),
        ),
        says="shuffle first, pad then",
    ),
    Wrong("shard-indices", "everything on each rank", ((SPLIT, "return padded"),), says="each rank gets all"),
    Wrong("shard-indices", "one rank off", ((SPLIT, "return padded[rank + 1 :: world]"),), says="waits for ever"),
    Wrong(
        "shard-indices", "tensor returned", ((SPLIT, "return torch.tensor(padded)[rank::world]"),), says="list of ints"
    ),
    # shard-batches
    Wrong(
        "shard-batches",
        "last batch lost",
        ((STARTS, "for start in range(0, len(order) - global_batch + 1, global_batch):"),),
        says="the last global batch may be short",
        fast=True,
    ),
    Wrong(
        "shard-batches",
        "empty batch left out",
        ((APPEND, "if part:\n            " + APPEND),),
        says="needs an empty batch",
        fast=True,
    ),
    Wrong("shard-batches", "equal weights", ((APPEND, "batches.append(Batch(part, 1 / world))"),), says="count alike"),
    Wrong(
        "shard-batches",
        "numbers for weights",
        ((APPEND, "batches.append(Batch(part, len(part)))"),),
        says="these are numbers of samples",
    ),
    Wrong(
        "shard-batches",
        "weight by the full batch",
        ((APPEND, "batches.append(Batch(part, len(part) / global_batch))"),),
        says="divide by the length of the short batch",
    ),
    Wrong(
        "shard-batches",
        "weight times ranks",
        ((APPEND, "batches.append(Batch(part, world * len(part) / len(samples)))"),),
        says="the sum over the ranks should be 1",
    ),
    Wrong(
        "shard-batches",
        "remainder lost",
        ((FIRST, "first = rank * (len(samples) // world)"), (LAST, "last = first + len(samples) // world")),
        says="remainder of samples / ranks is lost",
    ),
    Wrong(
        "shard-batches",
        "remainder to the last rank",
        (
            (FIRST, "first = rank * (len(samples) // world)"),
            (LAST, "last = len(samples) if rank == world - 1 else first + len(samples) // world"),
        ),
        says="differ by one at most",
    ),
    Wrong(
        "shard-batches",
        "parts rounded up",
        (
            (FIRST, "first = rank * -(-len(samples) // world)"),
            (LAST, "last = first + -(-len(samples) // world)"),
        ),
        says="differ by one at most",
    ),
    Wrong("shard-batches", "no split", ((PART, "part = list(samples)"),), says="every rank has all samples"),
    Wrong(
        "shard-batches",
        "global batch per rank",
        ((STARTS, STARTS.replace("global_batch)", "global_batch * world)")), (SAMPLES, SAMPLES[:-1] + " * world]")),
        says="global_batch counts the samples of all ranks",
    ),
    Wrong(
        "shard-batches",
        "positions",
        ((SAMPLES, "samples = range(start, min(start + global_batch, len(order)))"),),
        says="look like positions",
    ),
    Wrong(
        "shard-batches",
        "last batch padded",
        ((SAMPLES, "samples = [order[i % len(order)] for i in range(start, start + global_batch)]"),),
        says="Nothing is padded here",
    ),
    Wrong(
        "shard-batches",
        "overlap at the borders",
        ((LAST, "last = -(-len(samples) * (rank + 1) // world)"),),
        says="occur twice",
    ),
    Wrong(
        "shard-batches",
        "ranks split first",
        (
            (
                "    batches = []\n    for start in",
                "    batches = []\n    mine, size = order[rank::world], -(-global_batch // world)\n"
                "    return [Batch(mine[i : i + size], 1 / world) for i in range(0, len(mine), size)]\n"
                "    for start in",
            ),
        ),
        says="global_batch counts the samples of all ranks",
    ),
    # load-in-background
    Wrong(
        "load-in-background",
        "no thread",
        ((PASS, "        yield from (self.load(indices) for indices in self.batches)\n        return\n" + PASS),),
        says="nothing is loaded",
        fast=True,
    ),
    Wrong("load-in-background", "no limit", (("                free.acquire()\n", ""),), says="the queue has no limit"),
    Wrong(
        "load-in-background",
        "all first",
        ((PASS, "        yield from [self.load(indices) for indices in self.batches]\n        return\n" + PASS),),
        says="arrives after all 12 batches are loaded",
    ),
    Wrong(
        "load-in-background",
        "error swallowed",
        ((CAUGHT, CAUGHT.replace("finished.put(error)", "finished.put(None)")),),
        says="as if all was well",
    ),
    Wrong(
        "load-in-background",
        "failed batch left out",
        ((CAUGHT, "                    continue\n            finished.put(None)"),),
        says="as if all was well",
    ),
    Wrong(
        "load-in-background",
        "error kills the thread",
        ((CAUGHT, CAUGHT.replace("finished.put(error)", "error = None")),),
        says="the caller waits for ever",
    ),
    Wrong(
        "load-in-background",
        "error in other clothes",
        ((RAISED, RAISED.replace("raise item", "raise RuntimeError(str(item))")),),
        says="raise the same exception object",
    ),
    Wrong(
        "load-in-background",
        "error delivered as a batch",
        ((RAISED, ""),),
        says="as a batch: raise it instead",
    ),
    Wrong(
        "load-in-background",
        "error too early",
        (
            (PASS, "        failed = []\n" + PASS),
            (CAUGHT, CAUGHT.replace("finished.put(error)", "failed.append(error); finished.put(error)")),
            (RAISED, "                if failed:\n                    raise failed[0]\n"),
        ),
        says="were good and should be delivered first",
    ),
    Wrong(
        "load-in-background",
        "thread left behind",
        ((END, "            pass"),),
        says="thread still runs",
        fast=True,
    ),
    Wrong(
        "load-in-background",
        "join without a stop",
        ((END, "            thread.join()"),),
        says="Leaving the loop early blocks for ever",
    ),
    Wrong(
        "load-in-background",
        "stop not looked at",
        ((WAIT, "                free.acquire()\n"), (END, "            stopped.set()")),
        says="thread still runs",
    ),
    Wrong(
        "load-in-background",
        "last batch lost",
        (("for indices in self.batches:", "for indices in self.batches[:-1]:"),),
        says="The last batch never arrives",
    ),
    Wrong(
        "load-in-background",
        "first batch lost",
        (("        try:\n            while (item", "        finished.get()\n        try:\n            while (item"),),
        says="The first batch never arrives",
    ),
    Wrong(
        "load-in-background",
        "no mark at the end",
        (("            finished.put(None)\n", ""),),
        says="does not end",
    ),
    Wrong(
        "load-in-background",
        "one pass only",
        (("        self.batches = batches\n", "        self.batches = iter(batches)\n"),),
        says="each iter() must start a new pass",
    ),
    Wrong(
        "load-in-background",
        "depth ignored",
        (("threading.Semaphore(self.depth)", "threading.Semaphore(1)"),),
        says="is `depth` used",
    ),
    Wrong(
        "load-in-background",
        "several workers without order",
        (
            (
                PASS,
                "        from concurrent.futures import ThreadPoolExecutor, as_completed\n"
                "        with ThreadPoolExecutor(4) as pool:\n"
                "            for future in as_completed([pool.submit(self.load, one) for one in self.batches]):\n"
                "                yield future.result()\n"
                "        return\n" + PASS,
            ),
        ),
        says="arrive in another order",
    ),
)

RIGHT = (
    Right(
        "shard-indices",
        "Python's random and itertools",
        """
import itertools
import random


def shard_indices(size, rank, world, *, seed=0, epoch=0, shuffle=True):
    order = list(range(size))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    total = size + (-size) % world
    return list(itertools.islice(itertools.cycle(order), rank, total, world))
""",
    ),
    Right(
        "shard-indices",
        "padding by repetition of a tensor",
        """
def shard_indices(size, rank, world, *, seed=0, epoch=0, shuffle=True):
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order = torch.randperm(size, generator=generator) if shuffle else torch.arange(size)
    total = -(-size // world) * world
    order = order.repeat(-(-total // size))[:total]
    return order[rank:total:world].tolist()
""",
    ),
    Right(
        "shard-batches",
        "every world-th sample",
        """
def shard_batches(order, rank, world, *, global_batch):
    batches = []
    for step in range(-(-len(order) // global_batch)):
        samples = list(order)[step * global_batch : (step + 1) * global_batch]
        mine = samples[rank::world]
        batches.append(Batch(mine, len(mine) / len(samples)))
    return batches
""",
    ),
    Right(
        "shard-batches",
        "divmod",
        """
def shard_batches(order, rank, world, *, global_batch):
    left, batches = list(order), []
    while left:
        samples, left = left[:global_batch], left[global_batch:]
        each, more = divmod(len(samples), world)
        first = rank * each + min(rank, more)
        part = samples[first : first + each + (rank < more)]
        batches.append(Batch(part, len(part) / len(samples)))
    return batches
""",
    ),
    Right(
        "load-in-background",
        "a pool with one thread",
        """
from collections import deque
from concurrent.futures import ThreadPoolExecutor


class BackgroundLoader:
    def __init__(self, load, batches, *, depth=2):
        self.load, self.batches, self.depth = load, batches, depth

    def __iter__(self):
        todo = iter(self.batches)
        with ThreadPoolExecutor(1) as pool:
            waiting = deque(pool.submit(self.load, one) for _, one in zip(range(self.depth), todo))
            try:
                while waiting:
                    batch = waiting.popleft().result()
                    waiting.extend(pool.submit(self.load, one) for _, one in zip(range(1), todo))
                    yield batch
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
""",
    ),
    Right(
        "load-in-background",
        "a condition that both sides wait for",
        """
class BackgroundLoader:
    def __init__(self, load, batches, *, depth=2):
        self.load, self.batches, self.depth = load, batches, depth

    def __iter__(self):
        changed, ready, state = threading.Condition(), [], {"taken": 0, "stop": False}

        def work():
            for number, one in enumerate(self.batches):
                with changed:
                    changed.wait_for(lambda: state["stop"] or number < state["taken"] + self.depth)
                    if state["stop"]:
                        return
                try:
                    item = ("batch", self.load(one))
                except BaseException as error:
                    item = ("error", error)
                with changed:
                    ready.append(item)
                    changed.notify_all()
                if item[0] == "error":
                    return
            with changed:
                ready.append(("end", None))
                changed.notify_all()

        threading.Thread(target=work, daemon=True).start()
        try:
            while True:
                with changed:
                    changed.wait_for(lambda: ready)
                    kind, item = ready.pop(0)
                    state["taken"] += 1
                    changed.notify_all()
                if kind == "error":
                    raise item
                if kind == "end":
                    return
                yield item
        finally:
            with changed:
                state["stop"] = True
                changed.notify_all()
""",
    ),
)
