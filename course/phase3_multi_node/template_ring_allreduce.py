"""Exercises: the ring all-reduce, buckets, overlap, topology. Read guidelines.md first.

The default process group (gloo) exists when your code runs: use dist.get_rank(), dist.isend(), dist.recv(), ...
`python template_ring_allreduce.py` runs what you have written on two ranks; `phalanx learn check NAME` grades it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def split_chunks(flat: Tensor, count: int) -> list[Tensor]:
    """Return `count` views of a 1-D tensor whose sizes differ by at most one element; some may be empty."""
    return list(flat.tensor_split(count))


def neighbours(ring: Sequence[int] | None) -> tuple[int, int, int, int]:
    """Return (position of this rank in the ring, number of ranks in it, next rank, previous rank).

    ring: the ranks in ring order; None: all ranks, 0 to world - 1. Messages travel from each rank to the next one.
    """
    order = list(range(dist.get_world_size())) if ring is None else list(ring)
    position, size = order.index(dist.get_rank()), len(order)
    return position, size, order[(position + 1) % size], order[(position - 1) % size]


def ring_reduce_scatter(flat: Tensor, ring: Sequence[int] | None = None) -> None:
    """Sum a 1-D tensor over the ranks of the ring, in place, one chunk per rank.

    Chunk i is split_chunks(flat, n)[i]. Afterwards chunk (p + 1) % n of the rank at position p is the sum of this chunk
    over all ranks; what its other chunks hold does not matter. n - 1 messages per rank, of one chunk each, all to the
    next rank. Any size: also one that n does not divide, or smaller than n. Only send, recv, isend, irecv.
    """
    # TODO ring-reduce-scatter: n - 1 steps; in each one send a chunk to the next rank and add one from the previous.
    #   Hints, one at a time: phalanx learn hint ring-reduce-scatter
    raise NotImplementedError("ring_reduce_scatter")


def ring_all_gather(flat: Tensor, ring: Sequence[int] | None = None) -> None:
    """Give every rank all chunks, in place.

    Before: chunk (p + 1) % n of the rank at position p is finished, its other chunks are not. After: all chunks of all
    ranks are the finished ones. n - 1 messages per rank, of one chunk each, all to the next rank.
    """
    # TODO ring-all-gather: n - 1 steps; in each one pass a finished chunk on to the next rank.
    #   Hints, one at a time: phalanx learn hint ring-all-gather
    raise NotImplementedError("ring_all_gather")


def ring_all_reduce(tensor: Tensor, ring: Sequence[int] | None = None) -> None:
    """Replace a tensor by its sum over the ranks of the ring, in place.

    Any shape (also non-contiguous, as a transposed matrix is), any type, any size; a ring of one rank changes nothing.
    Each rank sends 2 (n - 1) messages and about 2 (n - 1) / n of the tensor's bytes, in the tensor's own type.
    """
    # TODO ring-all-reduce: join the two halves.
    #   Hints, one at a time: phalanx learn hint ring-all-reduce
    raise NotImplementedError("ring_all_reduce")


class Buckets:
    """Groups of parameters whose gradients travel in one message.

    parameters: in the order of registration (model.parameters()). limit: bytes of gradients per group.
    self.groups: lists of parameters, in reverse order of registration, because backward makes the last gradients first.
    A group takes parameters as long as they fit; a parameter larger than `limit` gets its own group. All gradients
    of a group have one dtype. Parameters with requires_grad=False are in no group.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], limit: int) -> None:
        # TODO buckets: fill self.groups here, and write `flatten` and `unflatten` below.
        #   Hints, one at a time: phalanx learn hint buckets
        raise NotImplementedError("Buckets")

    def flatten(self, index: int) -> Tensor:
        """Return the gradients of group `index` as one new 1-D tensor; a gradient that is None counts as zeros."""
        raise NotImplementedError("Buckets.flatten")

    def unflatten(self, index: int, flat: Tensor) -> None:
        """Write a tensor as flatten() returns it back into the gradients of group `index`, also where .grad is None."""
        raise NotImplementedError("Buckets.unflatten")


class OverlappedAverage:
    """Average the gradients over all ranks, bucket by bucket, while backward still runs.

    buckets: groups, flatten and unflatten as above. After loss.backward() the trainer calls finish(); then each
    gradient is the mean over the ranks. Each bucket is one dist.all_reduce per step, started (async_op=True) in the
    backward hook that completes the bucket. Some parameters may get no gradient in a step on some ranks, and ranks may
    produce their gradients in different orders. The same object serves many steps.
    """

    def __init__(self, buckets: Buckets) -> None:
        # TODO overlap: register the hooks here, and write `finish` below.
        #   Hints, one at a time: phalanx learn hint overlap
        raise NotImplementedError("OverlappedAverage")

    def finish(self) -> None:
        """Start the buckets that are not started yet, wait for all, and write the averages into the gradients."""
        raise NotImplementedError("OverlappedAverage.finish")


def ring_order(speed: Sequence[Sequence[float]]) -> list[int]:
    """Return the best ring over at most 7 ranks: a list that starts with rank 0 and has each rank once.

    speed[a][b]: speed of the link from rank a to rank b (not always that of b to a). A ring is as fast as its slowest
    link, the closing one from the last rank to rank 0 included. Best: the fastest slowest link; of those rings the one
    with the largest sum of link speeds; of those the first in the order of the lists. All ranks get the same result.
    """
    # TODO ring-order: choose the ring.
    #   Hints, one at a time: phalanx learn hint ring-order
    raise NotImplementedError("ring_order")


def hierarchical_all_reduce(tensor: Tensor, hosts: Sequence[str]) -> None:
    """Replace a contiguous tensor by its sum over all ranks, with few bytes between hosts.

    hosts[r]: the host of rank r; ranks of one host are not always neighbours, and hosts may have different numbers of
    ranks. Only send, recv, isend, irecv. Over links between hosts travel at most 2 (h - 1) times the tensor's bytes in
    all, h being the number of hosts, and only one rank per host sends or receives them.
    """
    # TODO hierarchical-all-reduce: sum inside each host, between the hosts, copy inside each host.
    #   Hints, one at a time: phalanx learn hint hierarchical-all-reduce
    raise NotImplementedError("hierarchical_all_reduce")


def show(rank: int, world: int, meeting: str) -> None:
    """Run what is written, on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    for part in (ring_reduce_scatter, ring_all_gather, ring_all_reduce):
        flat = torch.arange(5.0) + 100 * rank
        try:
            part(flat)
            print(f"rank {rank}: {part.__name__} of 0..4 and 100..104: {flat.tolist()}", flush=True)
        except NotImplementedError as missing:
            print(f"rank {rank}: {missing} is not written yet", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(show, args=(2, f"{folder}/meeting"), nprocs=2)
