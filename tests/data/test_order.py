"""The arithmetic that says which sample goes where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.order import BatchPlan, BatchSplit, SamplePlan, epoch_order


def plans(length, batch_size, dp_size, accumulation, *, drop_last=False):
    order = epoch_order(length, seed=7, epoch=1, shuffle=True)
    layouts = [BatchSplit(batch_size, rank, dp_size, accumulation) for rank in range(dp_size)]
    return order, [SamplePlan(order, layout, drop_last=drop_last) for layout in layouts]


def global_batches(ranks, start=0):
    """Put the ranks' micro-batches back together: one list of real samples an optimizer step."""
    steps, current = [], []
    for cuts in zip(*(plan.cuts(start) for plan in ranks), strict=True):
        for cut in cuts:
            assert len(cut.indices) == max(cut.info.samples, 1)
            current += cut.indices.tolist() if cut.info.samples else []
        assert len({cut.info.boundary for cut in cuts}) == 1
        if cuts[0].info.boundary:
            assert len(current) == cuts[0].info.global_samples
            steps.append(current)
            current = []
    assert not current
    return steps


def test_order_depends_on_seed_and_epoch_only():
    first = epoch_order(100, seed=1, epoch=0, shuffle=True)
    assert np.array_equal(first, epoch_order(100, seed=1, epoch=0, shuffle=True))
    assert not np.array_equal(first, epoch_order(100, seed=1, epoch=1, shuffle=True))
    assert not np.array_equal(first, epoch_order(100, seed=2, epoch=0, shuffle=True))
    assert sorted(first) == list(range(100))
    assert first.dtype == np.int64
    assert epoch_order(4, seed=1, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("batch_size", "dp_size", "accumulation"), [(12, 1, 1), (3, 4, 1), (3, 2, 2), (1, 3, 4)])
def test_global_batches_are_the_same_at_any_split(batch_size, dp_size, accumulation):
    order, ranks = plans(43, batch_size, dp_size, accumulation)
    expected = [order[at : at + 12].tolist() for at in range(0, 43, 12)]
    assert [sorted(step) for step in global_batches(ranks)] == [sorted(step) for step in expected]


@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    dp_size=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    drop_last=st.booleans(),
    start=st.integers(0, 60),
)
def test_every_sample_counts_once_and_weights_add_up(length, batch_size, dp_size, accumulation, drop_last, start):
    order, ranks = plans(length, batch_size, dp_size, accumulation, drop_last=drop_last)
    step = batch_size * dp_size * accumulation
    left = max(length - start, 0)
    expected = left - left % step if drop_last else left
    seen = [sample for batch in global_batches(ranks, start) for sample in batch]
    assert sorted(seen) == sorted(order[start : start + expected].tolist())
    if start == 0:
        cuts = [list(plan.cuts()) for plan in ranks]
        assert {len(each) for each in cuts} == {plan.micro_batches for plan in ranks}
        assert ranks[0].num_samples == expected
        weight = sum(cut.info.scale for each in cuts for cut in each) / dp_size
        assert weight == pytest.approx(ranks[0].steps)


def test_even_shares_without_accumulation_have_weight_one():
    _, ranks = plans(33, 3, 3, 1)
    full = [cut.info for plan in ranks for cut in plan.cuts() if cut.info.global_samples == 9]
    assert len(full) == 9
    assert {info.scale for info in full} == {1.0}


def test_a_rank_without_samples_gets_a_placeholder():
    order, ranks = plans(9, 2, 4, 1)
    last = [list(plan.cuts())[-1] for plan in ranks]
    assert [cut.info.samples for cut in last] == [1, 0, 0, 0]
    assert [cut.info.scale for cut in last] == [4.0, 0.0, 0.0, 0.0]
    assert all(cut.indices.tolist() == [order[8]] for cut in last)


def test_blocks_are_distributed_by_micro_step_then_rank():
    layout = BatchSplit(2, dp_rank=1, dp_size=2, accumulation=2)
    plan = SamplePlan(np.arange(8), layout, drop_last=False)
    assert [(cut.indices.tolist(), cut.info.offset, cut.info.boundary) for cut in plan.cuts()] == [
        ([2, 3], 2, False),
        ([6, 7], 6, True),
    ]


def test_ready_made_batches_are_distributed_whole_and_weighted_by_size():
    batches = [[0, 1, 2], [3], [4, 5]]
    ranks = [BatchPlan(batches, BatchSplit(1, rank, 2), drop_last=False) for rank in range(2)]
    first, second = (list(plan.cuts()) for plan in ranks)
    assert [(cut.indices, cut.info.samples, cut.info.scale) for cut in first] == [([0, 1, 2], 3, 1.5), ([4, 5], 2, 2.0)]
    assert [(cut.indices, cut.info.samples, cut.info.scale) for cut in second] == [([3], 1, 0.5), ([4], 0, 0.0)]
    assert [cut.indices for cut in ranks[0].cuts(start=4)] == [[4, 5]]
    assert (ranks[0].num_samples, ranks[0].micro_batches, ranks[0].steps) == (6, 2, 2)
    dropping = BatchPlan(batches, BatchSplit(1, 0, 2), drop_last=True)
    assert (dropping.num_samples, dropping.steps, dropping.length) == (4, 1, 6)
