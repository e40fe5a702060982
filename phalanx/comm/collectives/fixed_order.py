"""One order of additions, whatever the number of ranks: the sum has equal bits at 1, 2, 4 and 8 ranks.

Floating-point addition is not associative, so a sum depends on the order. Here the order is a property of the data.
A global batch is L *logical shards*; micro-batch m of rank r, of n ranks, is shard m n + r. They are added as a tree:

    T(a, s) = T(a, 2s) + T(a + s, 2s),  where T(a, s) is shard a itself when a + s >= L;  the total is T(0, 1)

For n a power of two the shards of one rank, {r, r + n, ...}, are the whole branch T(r, n). A rank adds up its branch
(`TreeAccumulator`), and the ranks add up the branches by halving and doubling with distances n/2, ..., 1:
together this is the same tree for every n. The bytes are those of halving and doubling, 2 (n-1)/n of the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.chunks import start_reduction, write_back
from phalanx.comm.collectives.halving import halve_and_double
from phalanx.errors import UsageError


def check_ranks(ranks: int) -> None:
    """Raise unless the number of ranks is a power of two, so that their shards are branches of the tree."""
    if ranks < 1 or ranks & (ranks - 1):
        lower = 1 << (ranks.bit_length() - 1) if ranks > 0 else 1
        raise UsageError(
            f"a fixed order of additions needs 1, 2, 4, 8, ... ranks, and there are {ranks}",
            hint=f"Run on {lower} or {2 * lower} ranks, or without the fixed order.",
        )


def all_reduce(tensor: torch.Tensor, channel: P2PChannel, op: str = "sum") -> None:
    """Combine the ranks' branches in the order of the tree, in place."""
    check_ranks(channel.size)
    flat, reduction = start_reduction("fixed-order all_reduce", tensor, channel, op)
    halve_and_double(flat, channel, reduction, ranks=channel.size)
    write_back(flat, tensor)


class TreeAccumulator:
    """Adds up one rank's micro-batches in the order of the tree, as they arrive; `count` of them at most.

    Micro-batch a is first added to a + P/2, where P is the next power of two: so the gradients of the first P/2
    micro-batches are kept in memory until their partners arrive.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UsageError(f"{count} micro-batches cannot be added up", hint="Give 1 or more.")
        self.count = count
        self._half = 1 << (count - 1).bit_length() >> 1
        self._fed = 0
        self._branches: list[list[torch.Tensor] | None] = []

    def feed(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over the next micro-batch's gradients, which the accumulator changes in place."""
        if self._fed == self.count:
            raise UsageError(f"all {self.count} micro-batches were fed already", hint="Take the total first.")
        partner = self._fed - self._half
        if partner < 0 or self._half == 0:
            self._branches.append(list(tensors))
        else:
            self._add(partner, tensors)
        self._fed += 1

    def take(self) -> list[torch.Tensor]:
        """Return the rank's branch of the tree, and reset; missing shards at the end of an epoch count as zeros."""
        if self._fed == 0:
            raise UsageError("no micro-batch was fed", hint="Feed one or more first.")
        stride = self._half // 2
        while stride:
            for first in range(min(stride, len(self._branches) - stride)):
                self._add(first, self._release(first + stride))
            stride //= 2
        total = self._release(0)
        self._branches, self._fed = [], 0
        return total

    def _add(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        sums = self._branches[index]
        assert sums is not None, "a branch is added to before it is released"
        for into, tensor in zip(sums, tensors, strict=True):
            into.add_(tensor)

    def _release(self, index: int) -> list[torch.Tensor]:
        sums = self._branches[index]
        assert sums is not None, "a branch is released once"
        self._branches[index] = None
        return sums


def tree_sum(shards: Sequence[torch.Tensor], first: int = 0, stride: int = 1) -> torch.Tensor:
    """Return T(first, stride) over all shards in one process: the definition, to compare with."""
    if first + stride >= len(shards):
        return shards[first]
    return tree_sum(shards, first, 2 * stride) + tree_sum(shards, first + stride, 2 * stride)
