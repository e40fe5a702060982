"""Checks of replicas and slow ranks: the decisions, and the hash of weights."""

from __future__ import annotations

import pytest
import torch

from phalanx.config import DistributedConfig
from phalanx.errors import ConfigError
from phalanx.loop.checks import Finding, OwnTime, hash_of, odd_replicas, slow_ranks
from phalanx.observe.step_clock import StepClock

CPU = torch.device("cpu")


def test_equal_replicas_are_not_suspected():
    assert odd_replicas([7, 7, 7]) is None
    assert odd_replicas([7]) is None


def test_the_odd_replica_is_named_by_the_majority():
    found = odd_replicas([7, 7, 9, 7])
    assert found == Finding("corruption", (2,), "the weights of rank 2 differ from those of the 3 other ranks")


@pytest.mark.parametrize("hashes", [[1, 2], [1, 1, 2, 2], [1, 2, 3]])
def test_without_a_majority_all_are_named(hashes):
    found = odd_replicas(hashes)
    assert found is not None
    assert found.ranks == tuple(range(len(hashes)))


def test_slow_ranks_are_named():
    assert slow_ranks([1.0, 1.1, 0.9, 1.2], 2.0) is None
    found = slow_ranks([0.010, 0.011, 0.050, 0.010], 2.0)
    assert found is not None
    assert found.ranks == (2,)
    assert found.why == "rank 2 takes 50 ms per step without waiting, the others 10 ms"
    assert slow_ranks([0.01, 0.05], 2.0).ranks == (1,)
    assert slow_ranks([0.01, 0.01, 0.05, 0.06, 0.01], 2.0).ranks == (2, 3)
    assert slow_ranks([0.01], 2.0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_one_flipped_bit_changes_the_hash(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(33, 7).to(dtype), torch.ones(5).to(dtype)]
    before = int(hash_of(tensors, CPU))
    assert int(hash_of([tensor.clone() for tensor in tensors], CPU)) == before
    tensors[0].view(torch.uint8).flatten()[100] ^= 1
    assert int(hash_of(tensors, CPU)) != before


def test_positions_count_in_the_hash():
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    assert int(hash_of([one], CPU)) != int(hash_of([two], CPU))
    assert int(hash_of([one, two], CPU)) != int(hash_of([two, one], CPU))


def test_tensors_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr("phalanx.loop.checks._CHUNK", 8)
    tensor = torch.arange(20.0)
    before = int(hash_of([tensor], CPU))
    tensor[[3, 11]] = tensor[[11, 3]]
    assert int(hash_of([tensor], CPU)) != before


def test_a_rank_has_its_own_time_and_not_the_wait_for_others():
    now = [0.0]
    clock = StepClock(lambda: now[0])
    pace = OwnTime(clock, torch.nn.Identity(), CPU)
    for between in (0.5, 0.01, 0.01):  # a callback that once takes long does not make a rank slow
        for phase, seconds in (("other", between), ("data", 0.01), ("forward", 0.02), ("backward", 0.05)):
            clock.enter(phase)
            now[0] += seconds
        clock.enter("other")
        pace.step_ends()
    assert pace.take() == pytest.approx(0.04)  # not the backward pass, which waits for the slowest rank
    assert pace.take() == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"check_replicas_every": 10, "strategy": "fsdp"}, "not 'fsdp'"),
        ({"straggler_factor": 2.0, "strategy": "local-sgd"}, "not 'local-sgd'"),
        ({"check_replicas_every": 10, "tensor_parallel": 2}, "ranks hold different parts"),
        ({"check_replicas_every": 0}, "must be 1 or more"),
        ({"straggler_factor": 1.0}, "must be greater than 1"),
        ({"on_corruption": "warn"}, "without check_replicas_every"),
        ({"check_replicas_every": 5, "on_corruption": "repair"}, "not one of"),
        ({"check_replicas_every": 5, "on_corruption": "replace"}, "without max_restarts"),
        ({"straggler_factor": 2.0, "on_straggler": "rebalance"}, "not one of"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(**settings)
