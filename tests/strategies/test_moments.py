"""Saving under local-sgd and diloco where ranks' optimizers have different states: no rank waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from phalanx.errors import ModelError
from phalanx.loop.formation import Formation

STRATEGIES = ["local-sgd", "diloco"]


def alone(strategy: str, **settings: Any) -> Formation:
    return Formation(device="cpu", strategy=strategy, sync_every=4, timeout=10, **settings)


def save_and_load(formation: Formation, optimizer: torch.optim.Optimizer, folder: str) -> list[dict[str, torch.Tensor]]:
    """Save, and return each parameter's state on this rank; then load it, and check that nothing changed by that."""
    formation.save(folder)
    states = [
        {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    formation.load(folder)
    for group in optimizer.param_groups:
        for parameter, state in zip(group["params"], states, strict=True):
            for key, value in state.items():
                assert torch.equal(optimizer.state[parameter][key], value), key
    return states


def skip_first_step(strategy: str, folder: str, skipping: int) -> list[dict[str, torch.Tensor]]:
    with alone(strategy, on_nonfinite="skip") as formation:
        model = nn.Linear(4, 3)
        wrapped, optimizer = formation.prepare(model, torch.optim.AdamW(model.parameters()))
        outputs = wrapped(torch.full((1, 4), formation.rank + 1.0))
        formation.backward((outputs * float("nan") if formation.rank == skipping else outputs).sum())
        optimizer.step()
        return save_and_load(formation, optimizer, folder)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("skipping", [0, 1])
def test_a_rank_that_skipped_its_first_step(ranks, tmp_path, strategy, skipping):
    first, second = ranks(skip_first_step, strategy, str(tmp_path), skipping, world_size=2)
    gradient = 2.0 - skipping  # that of the rank which stepped: its moments are not halved by the other's absence
    assert torch.allclose(first[0]["exp_avg"], torch.full((3, 4), 0.1 * gradient))
    assert first[0]["step"] == 1
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq", "step"))


def reach_one_part_each(strategy: str, folder: str) -> list[dict[str, torch.Tensor]]:
    with alone(strategy, find_unused_parameters=True) as formation:
        model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)])
        wrapped, optimizer = formation.prepare(model, torch.optim.Adam(model.parameters()))
        formation.backward(wrapped[formation.rank](torch.ones(1, 2)).sum())
        optimizer.step()
        return save_and_load(formation, optimizer, folder)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_only_one_rank_uses(ranks, tmp_path, strategy):
    first, second = ranks(reach_one_part_each, strategy, str(tmp_path), world_size=2)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.allclose(ours["exp_avg"], torch.full_like(ours["exp_avg"], 0.1))
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])


class WithMasters(torch.optim.Optimizer):
    """SGD on fp32 copies of the parameters, as optimizers of bf16 models keep them; with a count and a row of codes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.float()
                state["codes"] = torch.full((3,), int(parameter.grad.flatten()[0]), dtype=torch.uint8)
            state["master"] -= parameter.grad.float()
            parameter.copy_(state["master"])


def keep_masters(strategy: str, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    with alone(strategy) as formation:
        model = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
        nn.init.zeros_(model.weight)
        wrapped, optimizer = formation.prepare(model, WithMasters(model.parameters()))
        formation.backward(wrapped(torch.full((1, 4), formation.rank + 1.0, dtype=torch.bfloat16)).sum())
        optimizer.step()
        state = save_and_load(formation, optimizer, folder)[0]
        return state["master"], state["codes"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moments_larger_than_the_parameters(ranks, tmp_path, strategy):
    for master, codes in ranks(keep_masters, strategy, str(tmp_path), world_size=2):
        assert torch.equal(master, torch.full((3, 4), -1.5))
        assert codes.tolist() == [1, 1, 1], "what has no average is the first rank's"


def keep_other_forms() -> None:
    with alone("local-sgd") as formation:
        model = nn.Linear(4, 3, bias=False)
        _, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), momentum=0.9))
        optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(3, 4 + formation.rank)
        formation.strategy.state(model, [optimizer])


def test_moments_of_different_shapes_are_refused(ranks):
    with pytest.raises(
        ModelError, match=r"weight, momentum_buffer\) is .* \(3, 4\) on rank 0 and .* \(3, 5\) on rank 1"
    ):
        ranks(keep_other_forms, world_size=2)
