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
    #   Hint 1: the chunk that you received and added in one step is the one that you send in the next step. Which chunk
    #           must you send in the first step, so that after n - 1 steps you have added chunk (p + 1) % n last?
    #   Hint 2: in step s (from 0) send chunk (p - s) % n; add what comes to chunk (p - s - 1) % n. If every rank
    #           first calls dist.send, which rank calls dist.recv?
    #   Hint 3: start dist.isend of your chunk, receive with dist.recv into a new tensor of the size of the chunk that
    #           it is added to, wait for the isend, add. (The other cure: even positions send first, odd ones receive
    #           first.) Do not receive into the chunk itself: this would overwrite your part of the sum.
    raise NotImplementedError("ring_reduce_scatter")


def ring_all_gather(flat: Tensor, ring: Sequence[int] | None = None) -> None:
    """Give every rank all chunks, in place.

    Before: chunk (p + 1) % n of the rank at position p is finished, its other chunks are not. After: all chunks of all
    ranks are the finished ones. n - 1 messages per rank, of one chunk each, all to the next rank.
    """
    # TODO ring-all-gather: n - 1 steps; in each one pass a finished chunk on to the next rank.
    #   Hint 1: which chunk is finished on this rank before the first step, and which one after it?
    #   Hint 2: in step s send chunk (p + 1 - s) % n and receive chunk (p - s) % n. Nothing is added any more.
    #   Hint 3: here you can receive straight into the view of the chunk, as its old content has no use. Exchange as
    #           in ring_reduce_scatter, so that the ring cannot block.
    raise NotImplementedError("ring_all_gather")


def ring_all_reduce(tensor: Tensor, ring: Sequence[int] | None = None) -> None:
    """Replace a tensor by its sum over the ranks of the ring, in place.

    Any shape (also non-contiguous, as a transposed matrix is), any type, any size; a ring of one rank changes nothing.
    Each rank sends 2 (n - 1) messages and about 2 (n - 1) / n of the tensor's bytes, in the tensor's own type.
    """
    # TODO ring-all-reduce: join the two halves.
    #   Hint 1: the halves need a 1-D tensor. When is the flat form of a tensor a view of it, and when is it a copy?
    #   Hint 2: make a contiguous flat tensor, call the two functions, and copy the result back with tensor.copy_().
    #   Hint 3: tensor.contiguous().view(-1) is the tensor itself if it is contiguous, else a copy; copy_() of a tensor
    #           onto itself changes nothing, so one path serves both. Hand `ring` on to both halves.
    raise NotImplementedError("ring_all_reduce")


class Buckets:
    """Groups of parameters whose gradients travel in one message.

    parameters: in the order of registration (model.parameters()). limit: bytes of gradients per group.
    self.groups: lists of parameters, in reverse order of registration, because backward makes the last gradients first.
    A group takes parameters as long as they fit; a parameter larger than `limit` gets a group of its own. All gradients
    of a group have one dtype. Parameters with requires_grad=False are in no group.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], limit: int) -> None:
        # TODO buckets: fill self.groups here, and write `flatten` and `unflatten` below.
        #   Hint 1: go through the parameters from the last to the first. When does a new group begin?
        #   Hint 2: bytes are numel() * element_size(). A new group begins when the sum would exceed the limit, or when
        #           the dtype changes. The order inside a group is the order in which you met the parameters.
        #   Hint 3: flatten: torch.cat of reshaped gradients, zeros for a missing one: another rank may have it, and
        #           all ranks must send equally many bytes. unflatten: split by numel(), reshape, copy into .grad.
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
        #   Hint 1: a hook sees one parameter. How do you know that it was the last one of its bucket? And what happens
        #           if rank 0 starts bucket 0 first, while rank 1 starts bucket 1 first?
        #   Hint 2: parameter.register_post_accumulate_grad_hook runs when .grad is ready. Count down per bucket. Start
        #           bucket i only when buckets 0 to i - 1 are started: a collective meets the one with the same number.
        #   Hint 3: keep (flat, work) of each started bucket in a list; its length is the next bucket's number. After
        #           each hook start buckets as long as the next one is complete. finish(): start the rest, wait for
        #           each work, divide by the number of ranks, unflatten, and reset the counts for the next step.
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
    #   Hint 1: how many rings are there for 7 ranks, if rank 0 comes first? Is it too many to try them all?
    #   Hint 2: itertools.permutations of the other ranks, in ascending order, gives the lists in order.
    #   Hint 3: compare tuples (slowest link, sum of links) and replace the best only by a strictly larger one.
    raise NotImplementedError("ring_order")


def hierarchical_all_reduce(tensor: Tensor, hosts: Sequence[str]) -> None:
    """Replace a contiguous tensor by its sum over all ranks, with few bytes between hosts.

    hosts[r]: the host of rank r; ranks of one host are not always neighbours, and hosts may have different numbers of
    ranks. Only send, recv, isend, irecv. Over links between hosts travel at most 2 (h - 1) times the tensor's bytes in
    all, h being the number of hosts, and only one rank per host sends or receives them.
    """
    # TODO hierarchical-all-reduce: sum inside each host, between the hosts, copy inside each host.
    #   Hint 1: one rank per host, its leader, can speak for the host. What must it know before it does?
    #   Hint 2: members send to their leader, which adds; the leaders sum among themselves; each leader sends the total
    #           to its members. The lowest rank of each host is a leader that all ranks agree on.
    #   Hint 3: ring_all_reduce(tensor, leaders) is the middle part, if your ring takes a list of ranks. A member needs
    #           only one send and one recv, in this order.
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
