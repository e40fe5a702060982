"""A fixed order of additions gives equal bits at 1, 2, 4 and 8 ranks; locations and links are found on real ranks."""

from __future__ import annotations

import pytest
import torch

from phalanx.comm.collectives import P2PChannel, all_reduce, fixed_order
from phalanx.comm.collectives.topology import find_locations, hosts, measure_links, ring_order
from phalanx.errors import UsageError

SHARDS = 24
"""Micro-batches over all ranks: 24, 12, 6 and 3 a rank."""


def shard(number: int) -> torch.Tensor:
    """Numbers whose sum depends on the order: large ones that cancel, small ones that are lost next to them."""
    generator = torch.Generator().manual_seed(number)
    scale = torch.tensor([1e8, -1e8, 1.0, 1e-8])[torch.randint(0, 4, (999,), generator=generator)]
    return scale * torch.rand(999, generator=generator)


def total() -> torch.Tensor:
    line = P2PChannel()
    accumulator = fixed_order.TreeAccumulator(SHARDS // line.size)
    for number in range(line.rank, SHARDS, line.size):
        accumulator.feed([shard(number)])
    (branch,) = accumulator.take()
    fixed_order.all_reduce(branch, line)
    return branch


def test_equal_bits_at_every_number_of_ranks(ranks):
    expected = fixed_order.tree_sum([shard(number) for number in range(SHARDS)])
    plain = sum(shard(number) for number in range(SHARDS))
    assert not torch.equal(expected, plain)
    for size in (1, 2, 4, 8):
        for found in ranks(total, world_size=size):
            assert torch.equal(found, expected)


def test_three_ranks_are_refused(ranks):
    def run():
        with pytest.raises(UsageError, match="and there are 3"):
            fixed_order.all_reduce(torch.ones(3), P2PChannel())

    ranks(run, world_size=3)


def test_locations_and_links_of_real_ranks(ranks):
    def run():
        line = P2PChannel()
        places = find_locations(line)
        sent = line.sent_bytes
        assert find_locations(line) is places
        assert line.sent_bytes == sent
        turned = line.subgroup([2, 0, 1])
        tensor = torch.full((5,), float(line.rank))
        all_reduce(tensor, turned)
        assert tensor.eq(3).all()
        return places, measure_links(line, nbytes=1 << 16, rounds=2)

    found = ranks(run, world_size=3)
    places, matrix = found[0]
    assert hosts(places) == [[0, 1, 2]]
    assert ring_order(places) == [0, 1, 2]
    for rank in range(3):
        assert found[rank] == (places, matrix)
        for other in range(3):
            assert (matrix.latency_s[rank][other] > 0) == (rank != other)
            assert matrix.bandwidth[rank][other] == matrix.bandwidth[other][rank]
