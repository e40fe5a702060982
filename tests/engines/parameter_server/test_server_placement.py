"""Who holds what on parameter servers: spread by size, cut between rows, re-balanced with few moves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from phalanx.engines.parameter_server.placement import Piece, Placement, plan_placement, rebalance, spread
from phalanx.engines.parameter_server.servers import owner
from phalanx.errors import UsageError


def piece(name: str, *shape: int) -> Piece:
    return Piece(name, shape, "float32", 4)


def covered(placement: Placement) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for shard in placement.shards:
        for part in shard:
            found.setdefault(part.name, []).append((part.start, part.stop))
    return {name: sorted(parts) for name, parts in found.items()}


def test_the_largest_piece_is_placed_first_on_the_least_loaded_shard():
    placement = spread([piece("a", 7), piece("b", 6), piece("c", 5), piece("d", 4)], 2, cut=False)
    assert [{part.name for part in shard} for shard in placement.shards] == [{"a", "d"}, {"b", "c"}]
    assert placement.loads == [44, 44]


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_large_tensors_are_cut_between_rows_and_nothing_is_lost(shards):
    tensors = [piece("table", 1000, 16), piece("up", 64, 16), piece("bias", 64), piece("scale")]
    placement = spread(tensors, shards)
    parts = covered(placement)
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.shape else 1
        bounds = parts[tensor.name]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == rows
        assert all(first[1] == second[0] for first, second in itertools.pairwise(bounds))
    total = sum(tensor.nbytes for tensor in tensors)
    assert sum(placement.loads) == total
    assert max(placement.loads) - min(placement.loads) <= total / shards / 4 + 16 * 4


def test_measured_costs_count_instead_of_bytes():
    tensors = [piece("cold", 100), piece("hot", 10), piece("warm", 10)]
    placement = spread(tensors, 2, cut=False, costs={"cold": 1.0, "hot": 5.0, "warm": 4.0})
    assert [{part.name for part in shard} for shard in placement.shards] == [{"hot"}, {"cold", "warm"}]


def test_more_shards_than_pieces_are_refused():
    with pytest.raises(UsageError, match=r"num_servers = 3.*only 2 pieces[\s\S]*num_servers = 2"):
        spread([piece("a", 1), piece("b", 1)], 3)


def test_rebalancing_moves_few_pieces_and_balances_the_load():
    before = spread([piece(f"p{number}", 10) for number in range(8)], 2)
    more = rebalance(before, 4)
    assert more.loads == [80, 80, 80, 80]
    stayed = sum(part in more.shards[shard] for shard in (0, 1) for part in before.shards[shard])
    assert stayed == 4
    fewer = rebalance(more, 2)
    assert fewer.loads == [160, 160]
    assert all(part in fewer.shards[shard] for shard in (0, 1) for part in more.shards[shard])


def test_rebalancing_by_measured_work():
    before = spread([piece(f"p{number}", 10) for number in range(4)], 2, cut=False)
    costs = {part.key: 10.0 if part in before.shards[0] else 1.0 for shard in before.shards for part in shard}
    after = rebalance(before, 2, costs=costs)
    loads = [sum(costs[part.key] for part in shard) for shard in after.shards]
    assert max(loads) <= 12
    assert rebalance(after, 2, costs=costs) == after


def test_parameters_are_cut_only_for_optimizers_that_work_by_element():
    class Whole(torch.optim.SGD):
        """It might look at a parameter's norm."""

    model = nn.Linear(64, 64)
    assert len(covered(plan_placement(model, torch.optim.SGD(model.parameters()), 2))["weight"]) > 1
    assert covered(plan_placement(model, Whole(model.parameters()), 2))["weight"] == [(0, 64)]


def test_shards_are_started_round_robin_over_machines():
    assert [owner(number, 4, 2) for number in range(5)] == [0, 2, 1, 3, 0]
    assert [owner(number, 2, 2) for number in range(3)] == [0, 1, 0]
