"""What the gate before a step notes, so that a step can be undone; the gate itself needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.recovery.ranks.gate import HostState


class Counting(torch.optim.Optimizer):
    """Keeps plain numbers, replaces tensors instead of changing them, and counts in its groups."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1, "taken": 0})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                parameter.add_(state["mean"], alpha=-group["lr"])


def stepped(model, optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_state_that_was_loaded_meanwhile_is_undone():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    noted = HostState(optimizer)
    assert not noted.is_on_gpu
    for _ in range(2):
        noted.note()
        stepped(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # other tensors, as many
    before = described(optimizer)
    noted.note()
    stepped(model, optimizer)
    noted.put_back()
    torch.testing.assert_close(described(optimizer), before, rtol=0, atol=0)


def described(optimizer):
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    entries = [
        {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
        for entry in optimizer.state.values()
    ]
    return groups, entries


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, Counting], ids=lambda make: make.__name__)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_is_undone_on_the_host(make, steps):
    """Tensors of a GPU are put back by the gate; here all but the parameters are the host's."""
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    for _ in range(steps):
        stepped(model, optimizer)
    noted, before = HostState(optimizer), described(optimizer)
    noted.note()
    stepped(model, optimizer)
    noted.put_back()
    torch.testing.assert_close(described(optimizer), before, rtol=0, atol=0)
    noted.note()  # once more: what was noted is not used up
    stepped(model, optimizer)
    noted.put_back()
    torch.testing.assert_close(described(optimizer), before, rtol=0, atol=0)
