"""The bytes sent agree with theory, and a mismatch between ranks is raised on all of them."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.collectives import P2PChannel, all_gather, all_reduce, all_to_all, barrier, reduce_scatter, scatter
from phalanx.comm.collectives.chunks import bounds
from phalanx.comm.collectives.mismatch import HEADER_BYTES
from phalanx.comm.collectives.tree import relatives
from phalanx.errors import CommunicationError, UsageError

BYTES = 4


def block(size: int, numel: int, rank: int) -> int:
    edges = bounds(numel, size)
    return BYTES * (edges[rank % size + 1] - edges[rank % size])


def halving_bytes(size: int, numel: int, rank: int) -> int:
    """Halving sends all blocks but the own one, doubling what is held before each step; folded ranks send it all."""
    power = 1 << (size.bit_length() - 1)
    folded = size - power
    if rank >= power:
        return BYTES * numel
    sent = BYTES * numel - block(power, numel, rank)
    distance = 1
    while distance < power:
        first = rank // distance * distance
        sent += sum(block(power, numel, first + place) for place in range(distance))
        distance *= 2
    return sent + (BYTES * numel if rank < folded else 0)


def expected_bytes(size: int, numel: int, rank: int) -> dict[str, int]:
    whole = BYTES * numel
    parent, children = relatives(rank, size)
    return {
        "ring": 2 * whole - block(size, numel, rank) - block(size, numel, rank + 1) if size > 1 else 0,
        "tree": whole * ((parent is not None) + len(children)),
        "halving-doubling": halving_bytes(size, numel, rank),
        "reduce_scatter": whole - block(size, numel, rank),
        "all_gather": (size - 1) * whole,
        "all_to_all": (size - 1) * whole,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_sent_agree_with_theory(ranks, size):
    def run():
        found = []
        for numel in (0, 1, 12, 1003):
            line = P2PChannel()
            sent, before = {}, 0
            calls = {
                "ring": lambda x, line=line: all_reduce(x, line),
                "tree": lambda x, line=line: all_reduce(x, line, algorithm="tree"),
                "halving-doubling": lambda x, line=line: all_reduce(x, line, algorithm="halving-doubling"),
                "reduce_scatter": lambda x, line=line: reduce_scatter(x, line),
                "all_gather": lambda x, line=line: all_gather(x, line),
                "all_to_all": lambda x, line=line: all_to_all(x.expand(size, -1), line),
            }
            for name, call in calls.items():
                call(torch.ones(numel))
                sent[name], before = line.sent_bytes - before, line.sent_bytes
            found.append((numel, sent, line.control_bytes))
        return found

    rounds = (size - 1).bit_length()
    for rank, found in enumerate(ranks(run, world_size=size)):
        for numel, sent, control in found:
            assert sent == expected_bytes(size, numel, rank)
            assert control == 6 * rounds * HEADER_BYTES
            if numel == 12:  # every size divides it
                assert sent["ring"] == 2 * (size - 1) * BYTES * numel // size


def test_ranks_that_disagree_are_named_on_all_ranks(ranks):
    """Afterwards the channel still works: nothing of the failed call is left in it."""

    def message_of(call):
        with pytest.raises(CommunicationError) as caught:
            call()
        return caught.value.message

    def run():
        line = P2PChannel()
        odd = line.rank == 1
        words = [
            message_of(lambda: all_reduce(torch.zeros(7 + odd), line)),
            message_of(lambda: all_reduce(torch.zeros(7, dtype=torch.int32 if odd else torch.float32), line)),
            message_of(lambda: all_reduce(torch.zeros(7), line, "max" if odd else "mean")),
            message_of(lambda: barrier(line) if odd else all_gather(torch.zeros(2, 2), line)),
            message_of(lambda: scatter(torch.zeros(2), line, torch.zeros(5, 2) if line.rank == 0 else None)),
        ]
        tensor = torch.ones(5)
        all_reduce(tensor, line)
        assert tensor.eq(3).all()
        return words

    for shape, dtype, op, call, source in ranks(run, world_size=3):
        assert "rank 1 calls ring all_reduce sum (8,) float32" in shape
        assert "calls ring all_reduce sum (7,) float32" in shape
        assert "rank 1 calls ring all_reduce sum (7,) int32" in dtype
        assert "rank 1 calls ring all_reduce max (7,) float32" in op
        assert "rank 1 calls barrier" in call
        assert "calls ring all_gather (2, 2) float32" in call
        assert "rank 0 calls scatter from 0 of (5, 2) torch.float32, where (3, 2) torch.float32 is needed" in source


def test_unsupported_reductions_are_refused_with_a_reason(ranks):
    def run():
        line = P2PChannel()
        words = []
        for tensor, op in [
            (torch.zeros(2, dtype=torch.int64), "mean"),
            (torch.zeros(2, dtype=torch.complex64), "max"),
            (torch.zeros(2), "maen"),
        ]:
            with pytest.raises(UsageError) as caught:
                all_reduce(tensor, line, op)
            words.append(str(caught.value))
        with pytest.raises(UsageError, match="Did you mean 'ring'"):
            all_reduce(torch.zeros(1), line, algorithm="rign")
        with pytest.raises(UsageError, match="first dimension of 2"):
            all_to_all(torch.zeros(3), line)
        return words

    mean, order, unknown = ranks(run, world_size=2)[1]
    assert "mean of int64" in mean
    assert "max is not defined for complex64" in order
    assert "Did you mean 'mean'" in unknown


def test_a_lost_peer_is_named(ranks):
    def run():
        group = dist.new_group([0, 1], timeout=timedelta(seconds=400))
        barrier(P2PChannel(group))
        if dist.get_rank() == 1:
            dist.destroy_process_group(group)
            return ""
        with pytest.raises(CommunicationError, match="exchange with rank 1 broke off") as caught:
            all_reduce(torch.ones(4), P2PChannel(group))
        return caught.value.hint

    begin = time.monotonic()
    assert "last output of rank 1" in ranks(run, world_size=2)[0]
    assert time.monotonic() - begin < 200, "a silent hang would last as long as the group's timeout"


def exchange_over_measured_hosts() -> tuple[list[list[int]], list[float]]:
    """Four ranks on three emulated hosts with unknown switches."""
    from phalanx.comm.collectives import hierarchical as exchanges
    from phalanx.comm.collectives import topology
    from phalanx.comm.collectives.topology import LinkMatrix

    locations = [topology.RankLocation(rank, f"host{max(rank - 1, 0)}") for rank in range(4)]
    exchanges.find_locations = lambda channel: locations
    measured: list[list[int]] = []

    def measure(channel, **settings):
        real = exchanges.links_measured(channel, **settings)
        measured.append(list(channel.peers))
        # the hosts 0 and 2 are near each other, whatever this machine says
        slow = [[0.0, 1.0, 1e-3], [1.0, 0.0, 1.0], [1e-3, 1.0, 0.0]]
        assert real.size == 3
        return LinkMatrix(slow, [[1e9] * 3] * 3)

    exchanges.links_measured, exchanges.measure_links = exchanges.measure_links, measure
    exchange = exchanges.ChannelExchange()
    order = list(exchange._ring.peers)
    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    exchange.all_reduce(tensor)
    return [order, *measured], [float(tensor.min()), float(tensor.max())]


def test_links_between_hosts_are_measured_where_switches_are_unknown(ranks):
    for rank, ((order, *measured), total) in enumerate(ranks(exchange_over_measured_hosts, world_size=4)):
        assert order == [0, 1, 3, 2], "host 2 comes before host 1: it is nearer to host 0"
        assert measured == ([[0, 2, 3]] if rank != 1 else []), "leaders alone measure"
        assert total == [10.0, 10.0]
