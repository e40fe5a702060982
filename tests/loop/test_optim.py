"""Learning rates: the values of every schedule and warm-up, scaling with the batch, and changes from outside."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.errors import ConfigError, UsageError
from phalanx.loop.optim import LRSchedule, build_optimizer, rate_factor, rate_scale


def factors(steps: int, **settings) -> list[float]:
    factor = rate_factor(DistributedConfig(**settings), steps)
    return [factor(step) for step in range(steps)]


def test_constant_stays_where_it_is():
    assert factors(4) == [1.0] * 4


def test_warm_up_rises_to_the_peak_from_the_first_step_on():
    assert factors(6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(8, warmup=0.5)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_evenly_and_cosine_along_a_half_wave():
    assert factors(5, lr_schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    expected = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert factors(4, lr_schedule="cosine") == pytest.approx(expected)
    assert factors(6, lr_schedule="cosine", warmup=2) == pytest.approx([0.5, 1.0, *expected])


def test_inverse_square_root_needs_no_end():
    factor = rate_factor(DistributedConfig(lr_schedule="inverse-sqrt", warmup=4), None)
    assert [factor(step) for step in (0, 3, 15)] == pytest.approx([0.25, 1.0, 0.5])


@pytest.mark.parametrize("settings", [{"lr_schedule": "cosine"}, {"lr_schedule": "linear"}, {"warmup": 0.1}])
def test_a_schedule_that_needs_the_length_of_the_run_raises_without_it(settings):
    with pytest.raises(UsageError, match="the data has no length"):
        rate_factor(DistributedConfig(**settings), None)


def test_a_warm_up_that_is_neither_share_nor_steps_is_refused():
    with pytest.raises(ConfigError, match=r"warmup = 1\.5: a share of the run is below 1"):
        DistributedConfig(warmup=1.5)


def test_the_rate_grows_with_the_batch_or_its_root():
    linear = DistributedConfig(lr_scaling="linear", base_batch_size=64)
    root = DistributedConfig(lr_scaling="sqrt", base_batch_size=64)
    assert rate_scale(linear, 256, 32) == 4
    assert rate_scale(root, 256, 32) == 2
    assert rate_scale(DistributedConfig(), 256, 32) == 1
    assert rate_scale(DistributedConfig(lr_scaling="linear"), 256, 32) == 8, "without a base: one rank's batch"


def test_a_group_that_is_added_later_has_its_own_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = LRSchedule(optimizer, lambda step: [1.0, 0.5, 0.5][step], 2.0)
    schedule.apply(0)
    schedule.apply(1)
    optimizer.param_groups[0]["lr"] = 7.0  # by a callback
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.1})
    schedule.apply(2)
    assert [group["lr"] for group in optimizer.param_groups] == [7.0, 0.1]


def test_every_group_keeps_its_own_rate_and_a_constant_schedule_leaves_changes_alone():
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": layers[0].parameters(), "lr": 0.1}, {"params": layers[1].parameters(), "lr": 0.4}]
    optimizer = torch.optim.SGD(groups)
    schedule = LRSchedule(optimizer, lambda step: 0.5, scale=2.0)
    schedule.apply(0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.4])
    optimizer.param_groups[0]["lr"] = 0.03  # a callback of the user's, a scheduler of their own
    schedule.apply(1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.03, 0.4])


def test_an_optimizer_gets_its_own_rates_back():
    layers = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": layer.parameters(), "lr": 0.1} for layer in layers[:2]])
    schedule = LRSchedule(optimizer, lambda step: 0.5**step, scale=2.0)
    schedule.apply(2)
    optimizer.add_param_group({"params": layers[2].parameters(), "lr": 0.4})
    schedule.apply(2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.05, 0.2])
    optimizer.param_groups[1]["lr"] = 0.03  # by a callback
    schedule.put_back(only_scheduled=True)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.03, 0.4]


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=rate, capturable=True)
    schedule = LRSchedule(optimizer, lambda step: 0.5**step, scale=2.0)
    schedule.apply(2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)
    schedule.put_back(only_scheduled=True)
    assert float(rate) == pytest.approx(0.1)


def test_a_group_that_was_added_keeps_its_rate_through_a_saved_schedule():
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    schedule = LRSchedule(optimizer, lambda step: 0.5**step)
    schedule.apply(0)
    optimizer.add_param_group({"params": layers[1].parameters(), "lr": 0.4})
    schedule.apply(1)
    other = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    restored = LRSchedule(other, lambda step: 0.5**step)
    other.add_param_group({"params": layers[1].parameters(), "lr": 0.2})  # the rate of the state
    restored.load_state_dict(schedule.state_dict())
    restored.apply(2)
    assert [group["lr"] for group in other.param_groups] == pytest.approx([0.025, 0.1])


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "rmsprop", "adagrad"])
def test_every_named_optimizer_trains_what_wants_a_gradient(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    frozen, trained = model[0].weight.clone(), model[1].weight.clone()
    optimizer = build_optimizer(DistributedConfig(optimizer=name), model.parameters(), torch.device("cpu"))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[1].weight, trained)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_momentum_is_the_first_beta_of_adam(name):
    parameters = [nn.Parameter(torch.zeros(2))]
    betas = [
        build_optimizer(DistributedConfig(optimizer=name, **given), parameters, torch.device("cpu")).defaults["betas"]
        for given in ({}, {"momentum": 0.5})
    ]
    assert betas == [(0.9, 0.999), (0.5, 0.999)]


@pytest.mark.parametrize("name", ["adam", "adamw", "adamw8bit", "lamb"])
def test_the_first_beta_is_below_1(name):
    with pytest.raises(ConfigError, match=f"momentum = 1.0: it is beta1 of {name}, and must be below 1"):
        DistributedConfig(optimizer=name, momentum=1.0)
