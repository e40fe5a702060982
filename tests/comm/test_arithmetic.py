"""The arithmetic under the collectives: cuts, trees, fixed order, places, near and far links."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.collectives.chunks import bounds, split
from phalanx.comm.collectives.fixed_order import TreeAccumulator, check_ranks, tree_sum
from phalanx.comm.collectives.mismatch import Announcement
from phalanx.comm.collectives.topology import (
    LinkMatrix,
    RankLocation,
    core_set,
    hosts,
    near_groups,
    numa_node,
    own_location,
    ring_order,
    switch_path,
    with_switches,
)
from phalanx.comm.collectives.tree import relatives
from phalanx.errors import UsageError

nasty = st.sampled_from([1e8, -1e8, 1.0, -1.0, 1e-8, -3e-8, 0.1, 7e7, -7e7, 1e-38, 3.3333])


@given(st.integers(0, 1000), st.integers(1, 17))
def test_parts_are_nearly_equal_and_cover_everything(length, parts):
    edges = bounds(length, parts)
    sizes = [part.numel() for part in split(torch.arange(length), parts)]
    assert (edges[0], edges[-1], len(sizes)) == (0, length, parts)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat(split(torch.arange(length), parts)), torch.arange(length))


@given(st.integers(1, 40), st.integers(0, 39))
def test_the_tree_connects_every_rank_once(size, root):
    root %= size
    family = {rank: relatives(rank, size, root) for rank in range(size)}
    assert family[root][0] is None
    children = [child for _, below in family.values() for child in below]
    assert sorted(children) == [rank for rank in range(size) if rank != root]
    assert all(family[child][0] == rank for rank, (_, below) in family.items() for child in below)


@given(st.lists(nasty, min_size=1, max_size=40))
def test_fixed_order_is_the_same_tree_for_every_number_of_ranks(numbers):
    """L shards over n ranks, L/n micro-batches each: the ranks' branches, added up, have the bits of the whole."""
    for ranks in (1, 2, 4, 8):
        usable = numbers[: len(numbers) // ranks * ranks]
        if not usable:
            continue
        shards = [torch.tensor([number, -number]) for number in usable]
        branches = [accumulate(shards[rank::ranks]) for rank in range(ranks)]
        while len(branches) > 1:  # distances n/2, ..., 1
            half = len(branches) // 2
            branches = [branches[rank] + branches[rank + half] for rank in range(half)]
        assert torch.equal(branches[0], tree_sum(shards))


def accumulate(micro_batches: list[torch.Tensor]) -> torch.Tensor:
    accumulator = TreeAccumulator(len(micro_batches))
    for _ in range(2):  # it begins anew after each total
        for tensor in micro_batches:
            accumulator.feed([tensor.clone(), tensor.clone()])
        first, second = accumulator.take()
        assert torch.equal(first, second)
    return first


def test_the_sum_of_the_test_numbers_depends_on_the_order():
    """Else the property above would hold for any order of additions."""
    shards = [torch.tensor([number]) for number in (1e8, 1.0, -1e8, 1.0)]
    assert tree_sum(shards) != sum(shards)


def test_the_accumulator_keeps_half_of_the_micro_batches():
    accumulator = TreeAccumulator(8)
    for number in range(8):
        accumulator.feed([torch.ones(1) * number])
        assert len(accumulator._branches) == min(number + 1, 4)
    assert accumulator.take()[0] == 28


@given(st.lists(nasty, min_size=1, max_size=20), st.integers(0, 20))
def test_missing_micro_batches_count_as_zeros(numbers, missing):
    """The end of an epoch: fewer than planned, in the order of the tree that was planned."""
    accumulator = TreeAccumulator(len(numbers) + missing)
    for number in numbers:
        accumulator.feed([torch.tensor([number])])
    whole = [torch.tensor([number]) for number in (*numbers, *[0.0] * missing)]
    assert torch.equal(accumulator.take()[0], tree_sum(whole))


def test_the_accumulator_checks_the_number_of_micro_batches():
    accumulator = TreeAccumulator(2)
    with pytest.raises(UsageError, match="no micro-batch was fed"):
        accumulator.take()
    accumulator.feed([torch.ones(1)])
    accumulator.feed([torch.ones(1)])
    with pytest.raises(UsageError, match="all 2 micro-batches"):
        accumulator.feed([torch.ones(1)])
    with pytest.raises(UsageError, match="0 micro-batches"):
        TreeAccumulator(0)


@pytest.mark.parametrize(("ranks", "hint"), [(3, "2 or 4"), (6, "4 or 8"), (0, "1 or 2")])
def test_fixed_order_requires_a_power_of_two(ranks, hint):
    with pytest.raises(UsageError, match=f"there are {ranks}") as caught:
        check_ranks(ranks)
    assert hint in caught.value.hint


@given(st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=9))
def test_after_the_last_round_every_rank_knows_of_a_mismatch(texts):
    size = len(texts)
    known = [Announcement(rank, text) for rank, text in enumerate(texts)]
    distance = 1
    while distance < size:
        known = [known[rank].and_also(known[rank - distance]) for rank in range(size)]
        distance *= 2
    differs = len(set(texts)) > 1
    assert all((found.other >= 0) == differs for found in known)
    assert all(not differs or texts[found.rank] != texts[found.other] for found in known)


def test_hosts_and_ring_order():
    """Ranks distributed round robin over hosts: those of a host, then those of a switch, are contiguous in the ring."""
    place = {"a": ("s1", "l1"), "b": ("s1", "l2"), "c": ("s1", "l1"), "d": ("s2", "l1")}
    names = "adbcadbc"
    places = [RankLocation(rank, name, rank // 4, place[name]) for rank, name in enumerate(names)]
    assert hosts(places) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ring_order(places) == [0, 4, 3, 7, 2, 6, 1, 5]


def test_ranks_in_order_stay_in_order():
    places = [RankLocation(rank, f"host{rank // 2}") for rank in range(6)]
    assert ring_order(places) == list(range(6))


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("hijk"), st.sampled_from([None, 0, 1])), min_size=1))
def test_ranks_of_a_group_are_contiguous_in_the_ring(found):
    places = [RankLocation(rank, switch + host, numa, (switch,)) for rank, (switch, host, numa) in enumerate(found)]
    order = ring_order(places)
    assert sorted(order) == list(range(len(places)))
    assert order[0] == 0
    for level in (lambda p: p.switch, lambda p: p.host, lambda p: (p.host, p.numa)):
        names = [level(places[rank]) for rank in order]
        changes = sum(left != right for left, right in pairwise(names))
        assert changes == len(set(names)) - 1


def test_switches_from_the_environment():
    slurm = {"SLURM_TOPOLOGY_ADDR": "core.leaf3.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert switch_path(slurm) == ("core", "leaf3")
    assert switch_path({"SLURM_TOPOLOGY_ADDR": "node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == ()
    assert switch_path({"PHALANX_SWITCH": "spine1.leaf4"}) == ("spine1", "leaf4")
    assert switch_path({}) == ()


def test_numa_node_of_cores(tmp_path):
    for node, cores in enumerate(("0-3,8", "4-7,9-11")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    assert core_set("0-3,8") == {0, 1, 2, 3, 8}
    assert numa_node({5, 10}, tmp_path) == 1
    assert numa_node({3, 8}, tmp_path) == 0
    assert numa_node({3, 4}, tmp_path) is None


def test_this_process_has_a_location():
    assert own_location(3, {}).host == own_location(4, {"PHALANX_SWITCH": "x"}).host
    assert own_location(4, {"PHALANX_SWITCH": "x"}).switch == ("x",)


def test_near_groups_at_the_widest_gap():
    groups = [[0, 3], [1, 2, 4]]
    size = 5
    near = {(a, b) for ranks in groups for a in ranks for b in ranks}
    latency = [[1e-5 if (a, b) in near else 9e-5 for b in range(size)] for a in range(size)]
    bandwidth = [[5e9 + a if (a, b) in near else 1e9 for b in range(size)] for a in range(size)]
    assert near_groups(LinkMatrix(latency, bandwidth)) == groups
    even = LinkMatrix([[1e-5 + 1e-6 * (a + b) for b in range(size)] for a in range(size)], [[1e9] * size] * size)
    assert near_groups(even) == [[0, 1, 2, 3, 4]]
    assert near_groups(LinkMatrix([[0.0]], [[0.0]])) == [[0]]


def test_measured_groups_replace_unknown_switches():
    places = [RankLocation(0, "a"), RankLocation(1, "b"), RankLocation(2, "c", switch=("known",))]
    named = with_switches(places, [[0, 2], [1]])
    assert [place.switch for place in named] == [("near0",), ("near1",), ("known",)]
