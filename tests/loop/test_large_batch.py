"""LARS and LAMB against their formulas in float64, what they leave alone, and decay without norms."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.config import resolve
from phalanx.diagnosis.memory_breakdown import optimizer_states
from phalanx.errors import ConfigError
from phalanx.loop.large_batch import LAMB, LARS
from phalanx.loop.optim import build_optimizer

CPU = torch.device("cpu")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)).double()


def lars(weight: Tensor, gradient: Tensor, state: dict[str, Any], *, step: int) -> Tensor:
    """One step by the formula: rate 0.5, momentum 0.9, decay 0.1, trust 1e-3."""
    if weight.ndim > 1:
        gradient = gradient + 0.1 * weight
        gradient = gradient * (1e-3 * weight.norm() / gradient.norm())
    state["v"] = 0.9 * state.get("v", 0) + gradient
    return weight - 0.5 * state["v"]


def lamb(weight: Tensor, gradient: Tensor, state: dict[str, Any], *, step: int) -> Tensor:
    """One step by the formula: rate 0.01, betas 0.9 and 0.999, decay 0.1."""
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * gradient**2
    update = (state["m"] / (1 - 0.9**step)) / ((state["v"] / (1 - 0.999**step)).sqrt() + 1e-6)
    if weight.ndim > 1:
        update = update + 0.1 * weight
        update = update * (weight.norm() / update.norm())
    return weight - 0.01 * update


@pytest.mark.parametrize(("name", "formula", "rate"), [("lars", lars, 0.5), ("lamb", lamb, 0.01)])
def test_steps_are_those_of_the_formula(name, formula, rate):
    model = make_model()
    config = resolve({"optimizer": name, "learning_rate": rate, "weight_decay": 0.1}).config
    optimizer = build_optimizer(config, model.parameters(), CPU)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    states: list[dict[str, Any]] = [{} for _ in expected]
    for step in range(1, 6):
        images = torch.randn(8, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(images).square().mean().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        expected = [formula(*each, step=step) for each in zip(expected, gradients, states, strict=True)]
        for parameter, value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_weights_of_zeros_move_and_parameters_without_a_gradient_stay(kind):
    zeros, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = kind([zeros, still], lr=0.1, weight_decay=0.1)
    zeros.grad = torch.ones(2, 2)
    optimizer.step()
    assert (zeros < 0).all()
    assert still.tolist() == [[1, 1], [1, 1]]
    assert optimizer.state.keys() == {zeros}


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_saved_state_continues_with_equal_bits(kind):
    model = make_model()
    optimizer = kind(model.parameters(), weight_decay=0.1)
    draw = torch.Generator().manual_seed(1)

    def step(trained: nn.Module, stepped: torch.optim.Optimizer, images: Tensor) -> None:
        trained.zero_grad()
        trained(images).square().mean().backward()
        stepped.step()

    first, second = (torch.randn(4, 2, 4, 4, dtype=torch.float64, generator=draw) for _ in range(2))
    step(model, optimizer, first)
    copied = copy.deepcopy(model)
    again = kind(copied.parameters(), weight_decay=0.1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer, second)
    step(copied, again, second)
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LARS, {"momentum": 1.0}, "momentum = 1.0: it is at least 0 and below 1"),
        (LARS, {"lr": -1.0}, "lr = -1.0: it is 0 or more"),
        (LAMB, {"betas": (0.9, 1.5)}, "beta2 = 1.5"),
    ],
)
def test_numbers_without_sense_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind([nn.Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "lars", "strategy": "deepspeed"}, "which takes the steps itself: write sgd"),
        ({"optimizer": "lamb", "strategy": "parameter-server"}, "which takes the steps itself: write adamw"),
        ({"optimizer": "lamb", "momentum": 1.0}, "it is beta1 of lamb"),
        ({"optimizer": "lars", "momentum": 1.0}, "with lars it must be below 1"),
    ],
)
def test_where_they_are_not_possible_is_said(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(settings)


def test_their_states_are_counted():
    assert (optimizer_states("lars"), optimizer_states("lamb")) == (1, 2)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw8bit"])
def test_decay_leaves_norms_and_biases_alone(name):
    model = make_model().float()
    config = resolve({"optimizer": name, "weight_decay": 0.5, "learning_rate": 0.1, "decay_norms": False}).config
    optimizer = build_optimizer(config, model.parameters(), CPU)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        expected = 0.95 * old if parameter.ndim > 1 else old
        torch.testing.assert_close(parameter.detach(), expected)
