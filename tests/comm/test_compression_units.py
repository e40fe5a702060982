"""Residuals of compression are in units of the mean loss: weights of the loss and fp16's scale do not change it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm.shm import SharedNumbers
from phalanx.loop.formation import Formation
from phalanx.loop.precision import LossScale

FIRST, NOTHING = [2.0, 1.0], [0.0, 0.0]
"""topk sends the larger number of the first step's gradient; the smaller one has to come in the second step."""


def steps(batches, scale=None, **settings):
    """Train two weights from zero by SGD on (inputs, weight); return them, the units, and the number of reductions."""
    reductions = 0
    plain = dist.all_reduce

    def counted(*args, **options):
        nonlocal reductions
        reductions += 1
        return plain(*args, **options)

    put = SharedNumbers.put

    def counted_put(self, number):
        nonlocal reductions
        reductions += 1
        put(self, number)

    with Formation(device="cpu", **settings) as formation:
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        if scale is not None:  # the config refuses fp16 on a CPU; torch's scaler itself works there
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
            formation.gradients.scale = LossScale(scaler, formation.device, agree=False)
        wrapped, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        units = []
        dist.all_reduce = counted
        SharedNumbers.put = counted_put
        try:
            for inputs, weight in batches:
                own = None if weight is None else weight * (formation.rank + 1)
                formation.backward(wrapped(torch.tensor([inputs])).sum(), weight=own)
                units += [lane.compressor.unit for lane in formation.strategy.lanes]
                optimizer.step()
                optimizer.zero_grad()
        finally:
            dist.all_reduce, SharedNumbers.put = plain, put
        return model.weight.detach().flatten(), units, reductions


def halves(**settings):
    return {"compression": "topk", "compression_ratio": 0.5, **settings}


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_a_residual_does_not_contain_the_weight_of_its_step(ranks, strategy):
    batches = [(FIRST, 100.0), (NOTHING, 1.0)]
    for weights, units, _ in ranks(lambda: steps(batches, **halves(strategy=strategy)), world_size=2):
        assert torch.allclose(weights, torch.tensor([-2.0, -1.0]))
        assert units == [None, None], "the only micro-batch of a step is divided before its backward pass"


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_a_residual_does_not_contain_the_loss_scale(ranks, strategy):
    batches = [(FIRST, None), (NOTHING, None)]
    for weights, units, _ in ranks(lambda: steps(batches, 1024.0, **halves(strategy=strategy)), world_size=2):
        assert torch.allclose(weights, torch.tensor([-2.0, -1.0]))
        assert [float(unit) for unit in units] == [1024.0, 2048.0]


def test_without_residuals_gradients_are_sent_with_the_loss_scale(ranks):
    tiny = [6e-8, 3e-8]  # lost in fp16, were it not for the scale
    settings = {"compression": "fp16", "strategy": "ring"}
    weights, units, _ = ranks(lambda: steps([(tiny, None)], 65536.0, **settings), world_size=2)[0]
    assert units == [None]
    assert torch.allclose(weights, -torch.tensor(tiny), rtol=1e-3, atol=0)


def test_weights_of_all_micro_batches_count(ranks):
    batches = [(FIRST, 60.0), (FIRST, 40.0), (NOTHING, 1.0), (NOTHING, 1.0)]
    settings = halves(strategy="ring", gradient_accumulation_steps=2)
    weights, units, _ = ranks(lambda: steps(batches, **settings), world_size=2)[0]
    assert torch.allclose(weights, torch.tensor([-2.0, -1.0]))
    assert [float(unit) for unit in units[1::2]] == [150.0, 3.0], "the mean over the ranks of what both weigh"


def test_the_weights_are_counted_once_per_step(ranks):
    batches = [(FIRST, 100.0), (NOTHING, 1.0)]
    compressed = ranks(lambda: steps(batches, **halves(strategy="ring")), world_size=2)[0]
    plain = ranks(lambda: steps(batches, strategy="ring"), world_size=2)[0]
    assert compressed[2] == plain[2] == 2


def test_without_weights_there_is_no_unit_and_no_reduction(ranks):
    batches = [(FIRST, 5.0), (FIRST, None)]
    _, units, reductions = ranks(lambda: steps(batches, **halves(strategy="ring")), world_size=2)[0]
    assert (units, reductions) == ([None, None], 1)


def test_warm_up_gives_the_same_bits_as_no_compression(ranks):
    batches = [([0.3, 0.7], 7.0), ([1.1, -0.4], 3.0)]
    warm = ranks(lambda: steps(batches, **halves(strategy="ring", compression_warmup=2)), world_size=2)[0][0]
    plain = ranks(lambda: steps(batches, strategy="ring"), world_size=2)[0][0]
    assert torch.equal(warm, plain)


@pytest.mark.parametrize("settings", [{}, {"compression": "topk", "compression_ratio": 0.5}])
def test_a_step_without_any_weight_changes_nothing(ranks, settings):
    weights = ranks(lambda: steps([(FIRST, 0.0)], strategy="ring", **settings), world_size=2)[0][0]
    assert torch.equal(weights, torch.zeros(2))
