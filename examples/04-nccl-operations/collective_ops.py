"""Every collective twice: by torch.distributed, and written out on point-to-point messages. Values, bytes and theory.

    phalanx train --script collective_ops.py --num-workers 2
    torchrun --standalone --nproc-per-node 4 collective_ops.py                      # gloo, or nccl with a GPU a rank
    phalanx train --script collective_ops.py --num-workers 3 -- --only all_to_all broadcast

Rank 0 draws what every rank held before and after. A rank on which torch and we disagree raises, and so does one whose
messages carried more or fewer bytes than the formula says. Ranks that share a machine do what shared memory can do a
third time, without a message.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import phalanx
from phalanx.comm import collectives as ours
from phalanx.comm.collectives.mismatch import HEADER_BYTES
from phalanx.comm.shm import share_memory
from phalanx.comm.shm.pages import group_text_gatherer

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.comm.shm import SharedGroup

ROOT = 0
OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}
# torch 2.13 has new names for these two, and warns of the old ones.
all_gather_by_torch = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_by_torch = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Setup:
    """Where this rank stands, and what connects it with the others."""

    channel: ours.P2PChannel
    shared: SharedGroup | None

    @property
    def rank(self) -> int:
        return self.channel.rank

    @property
    def size(self) -> int:
        return self.channel.size

    def values(self, count: int) -> torch.Tensor:
        """Return numbers that say whose they are: 10, 11, ... on rank 0, 20, 21, ... on rank 1."""
        return torch.arange(count, dtype=torch.float32, device=self.channel.device) + 10 * (self.rank + 1)


@dataclass
class Outcome:
    """What came of one collective on this rank; None where a rank gets nothing."""

    title: str
    before: torch.Tensor | None
    torch: torch.Tensor | None
    ours: torch.Tensor | None
    sent: int
    theory: int
    formula: str
    shared: torch.Tensor | None = None


def counted(setup: Setup, call: Callable[[], Any]) -> tuple[Any, int]:
    """Call, and return the result with the bytes of data that this rank sent for it."""
    before = setup.channel.sent_bytes
    result = call()
    return result, setup.channel.sent_bytes - before


def all_reduce(setup: Setup, op: str) -> Outcome:
    """All ranks get the sum (mean, ...) of all tensors: what gradients need."""
    given = setup.values(2 * setup.size)  # n divides it, so that the formula is a whole number
    by_torch, by_us = given.clone(), given.clone()
    dist.all_reduce(by_torch, OPS[op])
    _, sent = counted(setup, lambda: ours.all_reduce(by_us, setup.channel, op))
    theory = 2 * given.nbytes * (setup.size - 1) // setup.size
    outcome = Outcome(f"all_reduce {op}", given, by_torch, by_us, sent, theory, "2 (n-1)/n S")
    if setup.shared is not None:
        outcome.shared = setup.shared.empty(given.numel())  # lives in the pages: added up where it lies
        outcome.shared.copy_(given)
        setup.shared.all_reduce(outcome.shared, op)
    return outcome


def broadcast(setup: Setup) -> Outcome:
    """All ranks get the root's tensor: how replicas start equal."""
    given = setup.values(2)
    by_torch, by_us = given.clone(), given.clone()
    dist.broadcast(by_torch, src=ROOT)
    _, sent = counted(setup, lambda: ours.broadcast(by_us, setup.channel, ROOT))
    outcome = Outcome("broadcast", given, by_torch, by_us, sent, given.nbytes * children(setup), "S a child")
    if setup.shared is not None:
        outcome.shared = given.clone()
        setup.shared.broadcast(outcome.shared, ROOT)
    return outcome


def reduce(setup: Setup) -> Outcome:
    """The root gets the sum; what torch leaves on the others is not defined, ours leaves them as they are."""
    given = setup.values(2)
    by_torch, by_us = given.clone(), given.clone()
    dist.reduce(by_torch, dst=ROOT)
    _, sent = counted(setup, lambda: ours.reduce(by_us, setup.channel, "sum", ROOT))
    is_root = setup.rank == ROOT
    theory = 0 if is_root else given.nbytes
    return Outcome(
        "reduce", given, by_torch if is_root else None, by_us if is_root else None, sent, theory, "S to the parent"
    )


def all_gather(setup: Setup) -> Outcome:
    """All ranks get all tensors: how a sharded parameter becomes whole."""
    given = setup.values(2)
    by_torch = given.new_empty(2 * setup.size)
    all_gather_by_torch(by_torch, given)
    by_us, sent = counted(setup, lambda: ours.all_gather(given, setup.channel).flatten())
    # The whole is n tensors here, and a rank sends (n-1)/n of the whole.
    outcome = Outcome("all_gather", given, by_torch, by_us, sent, given.nbytes * (setup.size - 1), "(n-1) S")
    if setup.shared is not None:
        outcome.shared = torch.empty_like(by_torch)
        setup.shared.all_gather(outcome.shared, given)
    return outcome


def reduce_scatter(setup: Setup) -> Outcome:
    """Each rank gets its part of the sum: an all-reduce is this and an all_gather."""
    given = setup.values(2 * setup.size)
    by_torch = given.new_empty(2)
    reduce_scatter_by_torch(by_torch, given)
    by_us, sent = counted(setup, lambda: ours.reduce_scatter(given.clone(), setup.channel))
    theory = given.nbytes * (setup.size - 1) // setup.size
    outcome = Outcome("reduce_scatter", given, by_torch, by_us, sent, theory, "(n-1)/n S")
    if setup.shared is not None:
        outcome.shared = torch.empty_like(by_torch)
        setup.shared.reduce_scatter(outcome.shared, given)
    return outcome


def gather(setup: Setup) -> Outcome:
    """The root gets the tensors of all ranks."""
    given, is_root = setup.values(2), setup.rank == ROOT
    parts = [torch.empty_like(given) for _ in range(setup.size)] if is_root else None
    dist.gather(given, parts, dst=ROOT)
    by_us, sent = counted(setup, lambda: ours.gather(given, setup.channel, ROOT))
    return Outcome(
        "gather",
        given,
        torch.cat(parts) if parts is not None else None,
        by_us.flatten() if by_us is not None else None,
        sent,
        0 if is_root else given.nbytes,
        "S to the root",
    )


def scatter(setup: Setup) -> Outcome:
    """Each rank gets its row of what the root has."""
    given, is_root = setup.values(2 * setup.size), setup.rank == ROOT
    by_torch, by_us = given.new_empty(2), given.new_empty(2)
    dist.scatter(by_torch, list(given.split(2)) if is_root else None, src=ROOT)
    rows = given.view(setup.size, 2) if is_root else None
    _, sent = counted(setup, lambda: ours.scatter(by_us, setup.channel, rows, ROOT))
    theory = by_us.nbytes * (setup.size - 1) if is_root else 0
    return Outcome("scatter", given if is_root else None, by_torch, by_us, sent, theory, "(n-1) rows by the root")


def all_to_all(setup: Setup) -> Outcome:
    """Row r goes to rank r: how tokens find their experts."""
    given = setup.values(2 * setup.size)
    by_torch = torch.empty_like(given)
    dist.all_to_all_single(by_torch, given)
    by_us, sent = counted(setup, lambda: ours.all_to_all(given.view(setup.size, 2), setup.channel).flatten())
    theory = given.nbytes * (setup.size - 1) // setup.size
    outcome = Outcome("all_to_all", given, by_torch, by_us, sent, theory, "(n-1)/n S")
    if setup.shared is not None:
        outcome.shared = torch.empty_like(by_torch)
        setup.shared.all_to_all(outcome.shared, given)
    return outcome


def barrier(setup: Setup) -> Outcome:
    """No rank continues before all have arrived: each rank counts itself before, and must find n after it."""
    store = dist.distributed_c10d._get_default_store()

    def arrived_after(name: str, wait: Callable[[], object]) -> torch.Tensor:
        store.add(name, 1)
        wait()
        return torch.tensor([float(store.add(name, 0))])

    by_torch = arrived_after("example/torch", dist.barrier)
    headers = setup.channel.control_bytes
    by_us = arrived_after("example/ours", lambda: ours.barrier(setup.channel))
    sent = setup.channel.control_bytes - headers
    theory = (setup.size - 1).bit_length() * HEADER_BYTES  # a round doubles how many ranks have been heard of
    outcome = Outcome("barrier", torch.ones(1), by_torch, by_us, sent, theory, "log2(n) headers, no data")
    if setup.shared is not None:
        outcome.shared = arrived_after("example/shared", setup.shared.barrier)
    assert float(by_us) == setup.size, f"only {by_us} of {setup.size} ranks were at the barrier"
    return outcome


def children(setup: Setup) -> int:
    """Return how many children this rank has in the tree whose root is rank 0."""
    return sum(child < setup.size for child in (2 * setup.rank + 1, 2 * setup.rank + 2))


COLLECTIVES: dict[str, Callable[[Setup], Outcome]] = {
    **{f"all_reduce {op}": lambda setup, op=op: all_reduce(setup, op) for op in OPS},
    "broadcast": broadcast,
    "reduce": reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "barrier": barrier,
}


def check(outcome: Outcome) -> None:
    """Raise on the rank where two ways to do the same thing differ."""
    found = {"ours": outcome.ours} if outcome.shared is None else {"ours": outcome.ours, "shared": outcome.shared}
    for name, result in found.items():
        if not agree(result, outcome.torch):
            raise AssertionError(f"{outcome.title}: {name} has {row(result)}, torch has {row(outcome.torch)}")
    if outcome.sent != outcome.theory:
        raise AssertionError(f"{outcome.title}: sent {outcome.sent} bytes, theory says {outcome.theory}")


def agree(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Compare to rounding: a ring and a tree add in another order than torch does."""
    return one is other if one is None or other is None else torch.allclose(one, other)


def draw(outcome: Outcome, setup: Setup) -> None:
    """Show on rank 0 what every rank had and has, and what it sent."""
    own = (row(outcome.before), row(outcome.ours), outcome.sent, outcome.theory)
    every: list[Any] = [None] * setup.size
    dist.all_gather_object(every, own)
    if setup.rank != 0:
        return
    ways = "torch = ours" if outcome.shared is None else "torch = ours = shared memory"
    print(f"\n{outcome.title}   ({ways}; a rank sends {outcome.formula})")
    widths = [max(len(line[column]) for line in every) for column in range(2)]
    for rank, (before, after, sent, theory) in enumerate(every):
        print(f"  rank {rank}  {before:<{widths[0]}}  ->  {after:<{widths[1]}}   sent {sent} B, theory {theory} B")


def row(tensor: torch.Tensor | None) -> str:
    return "-" if tensor is None else " ".join(f"{value:g}" for value in tensor.tolist())


def main() -> None:
    args = parse_args()
    with phalanx.Formation(strategy="ddp") as formation:  # torch's own backend: nccl on GPUs, gloo on CPUs
        if formation.world_size == 1:
            raise SystemExit("one rank has no peer: start two, as the first lines of this file say")
        channel = ours.P2PChannel()
        setup = Setup(channel, open_shared_memory(channel))
        pages = "shared memory too" if setup.shared is not None else "no shared memory between them"
        formation.print(f"{setup.size} ranks on {dist.get_backend()}, tensors on {channel.device.type}; {pages}")
        for name, collective in COLLECTIVES.items():
            if args.only and name.split()[0] not in args.only:
                continue
            outcome = collective(setup)
            check(outcome)
            draw(outcome, setup)
        if setup.shared is not None:
            setup.shared.close()


def open_shared_memory(channel: ours.P2PChannel) -> SharedGroup | None:
    """Return the pages that these ranks can share; None on several machines, and where tensors are on GPUs."""
    if channel.device.type != "cpu":
        return None
    return share_memory(group_text_gatherer(None), channel.rank, channel.size, timeout=60.0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every collective by torch and by our own hands.")
    names = list(dict.fromkeys(name.split()[0] for name in COLLECTIVES))
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
