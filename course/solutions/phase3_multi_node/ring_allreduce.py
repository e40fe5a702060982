"""Ring all-reduce, buckets, overlap and topology: one right answer for each exercise of template_ring_allreduce.py."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def split_chunks(flat: Tensor, count: int) -> list[Tensor]:
    """Return `count` views of a 1-D tensor whose sizes differ by at most one element; some may be empty."""
    return list(flat.tensor_split(count))


def neighbours(ring: Sequence[int] | None) -> tuple[int, int, int, int]:
    """Return (position of this rank in the ring, number of ranks in it, next rank, previous rank)."""
    order = list(range(dist.get_world_size())) if ring is None else list(ring)
    position, size = order.index(dist.get_rank()), len(order)
    return position, size, order[(position + 1) % size], order[(position - 1) % size]


def swap(outgoing: Tensor, target: int, incoming: Tensor, source: int) -> None:
    """Send one tensor and receive another at the same time."""
    sending = dist.isend(outgoing, target)
    dist.recv(incoming, source)
    sending.wait()


def ring_reduce_scatter(flat: Tensor, ring: Sequence[int] | None = None) -> None:
    """Sum chunk by chunk: afterwards the rank at position p holds the whole sum of chunk (p + 1) % n."""
    position, size, target, source = neighbours(ring)
    chunks = split_chunks(flat, size)
    for step in range(size - 1):
        outgoing = chunks[(position - step) % size]
        chunk = chunks[(position - step - 1) % size]
        incoming = torch.empty_like(chunk)
        swap(outgoing, target, incoming, source)
        chunk += incoming


def ring_all_gather(flat: Tensor, ring: Sequence[int] | None = None) -> None:
    """Pass the finished chunks on until every rank has all of them."""
    position, size, target, source = neighbours(ring)
    chunks = split_chunks(flat, size)
    for step in range(size - 1):
        outgoing = chunks[(position + 1 - step) % size]
        incoming = chunks[(position - step) % size]
        swap(outgoing, target, incoming, source)


def ring_all_reduce(tensor: Tensor, ring: Sequence[int] | None = None) -> None:
    """Replace a tensor of any shape and type by its sum over the ranks of the ring."""
    flat = tensor.contiguous().view(-1)
    ring_reduce_scatter(flat, ring)
    ring_all_gather(flat, ring)
    tensor.copy_(flat.view(tensor.shape))


class Buckets:
    """Groups of parameters whose gradients travel in one message."""

    def __init__(self, parameters: Sequence[nn.Parameter], limit: int) -> None:
        self.groups: list[list[nn.Parameter]] = []
        used = 0
        for parameter in reversed([each for each in parameters if each.requires_grad]):
            size = parameter.numel() * parameter.element_size()
            group = self.groups[-1] if self.groups else []
            if not group or used + size > limit or group[0].dtype != parameter.dtype:
                self.groups.append([])
                used = 0
            self.groups[-1].append(parameter)
            used += size

    def flatten(self, index: int) -> Tensor:
        """Return the gradients of a group as one new 1-D tensor; a missing gradient counts as zeros."""
        parts = []
        for parameter in self.groups[index]:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parts.append(gradient.reshape(-1))
        return torch.cat(parts)

    def unflatten(self, index: int, flat: Tensor) -> None:
        """Write a 1-D tensor back into the gradients of a group."""
        group = self.groups[index]
        parts = flat.split([parameter.numel() for parameter in group])
        for parameter, part in zip(group, parts, strict=True):
            gradient = part.view(parameter.shape)
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)


class OverlappedAverage:
    """Average the gradients of all ranks, bucket by bucket, while backward still runs."""

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.reset()
        for index, group in enumerate(buckets.groups):
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self.arrived(index))

    def reset(self) -> None:
        """Forget the buckets of the last step."""
        self.missing = [len(group) for group in self.buckets.groups]
        self.started: list[tuple[Tensor, dist.Work]] = []

    def arrived(self, index: int) -> None:
        """Count one gradient, then start all buckets whose turn it is."""
        self.missing[index] -= 1
        while len(self.started) < len(self.missing) and self.missing[len(self.started)] == 0:
            self.start()

    def start(self) -> None:
        """Start the sum of the next bucket. Buckets start in one order on all ranks, so sums meet their like."""
        flat = self.buckets.flatten(len(self.started))
        self.started.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self) -> None:
        """Start what is left, wait, and write the averages into the gradients."""
        while len(self.started) < len(self.missing):
            self.start()
        for index, (flat, work) in enumerate(self.started):
            work.wait()
            self.buckets.unflatten(index, flat / dist.get_world_size())
        self.reset()


def ring_order(speed: Sequence[Sequence[float]]) -> list[int]:
    """Return the ring that starts at rank 0 and whose slowest link is the fastest possible."""
    best, chosen = (-1.0, -1.0), [0]
    for rest in itertools.permutations(range(1, len(speed))):
        order = [0, *rest]
        links = [speed[a][b] for a, b in zip(order, order[1:] + order[:1], strict=True)]
        value = (min(links), sum(links))
        if value > best:  # not >=: of equal rings the first counts, on every rank
            best, chosen = value, order
    return chosen


def hierarchical_all_reduce(tensor: Tensor, hosts: Sequence[str]) -> None:
    """Sum inside each host, then between one leader per host, then copy inside each host."""
    rank = dist.get_rank()
    members = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    leaders = sorted({host: other for other, host in reversed(list(enumerate(hosts)))}.values())
    if rank != members[0]:
        dist.send(tensor, members[0])
        dist.recv(tensor, members[0])
        return
    incoming = torch.empty_like(tensor)
    for member in members[1:]:
        dist.recv(incoming, member)
        tensor += incoming
    ring_all_reduce(tensor, leaders)
    for member in members[1:]:
        dist.send(tensor, member)


def show(rank: int, world: int, meeting: str) -> None:
    """Run every part on one rank and print the results of rank 0."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    flat = torch.arange(10.0) + 100 * rank
    ring_reduce_scatter(flat)
    whole = split_chunks(flat, world)[(rank + 1) % world].tolist()
    ring_all_gather(flat)
    nested = torch.full((3,), float(rank))
    hierarchical_all_reduce(nested, ["left", "left", "right", "right"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    average = OverlappedAverage(Buckets(list(model.parameters()), 64))
    model(torch.full((1, 4), float(rank))).sum().backward()
    average.finish()
    if rank == 0:
        print(f"rank 0 after the reduce-scatter: chunk 1 is {whole}")
        print(f"rank 0 after the all-gather: {flat.tolist()}")
        print(f"sum of 0, 1, 2, 3 on 2 hosts: {nested.tolist()}")
        print(f"buckets: {[len(group) for group in average.buckets.groups]} parameters")
        print(f"averaged gradient of the last layer's bias: {model[1].bias.grad.tolist()}")
        pairs = [[0, 1, 9, 1], [1, 0, 1, 9], [9, 1, 0, 1], [1, 9, 1, 0]]
        print(f"ring for ranks 0 and 2 on one host, 1 and 3 on the other: {ring_order(pairs)}")
    dist.destroy_process_group()


def main() -> None:
    """Start four ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(show, args=(4, f"{folder}/meeting"), nprocs=4)


if __name__ == "__main__":
    main()
