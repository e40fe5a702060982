"""local-sgd and diloco: training on this rank, and the published algorithm in one process, to compare with."""

from __future__ import annotations

from typing import Any

import torch

from phalanx import Formation

STEPS, ROUND, RATE, MOMENTUM = 8, 4, 0.6, 0.8


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step)).double()


def train_by_formation(strategy: str, **settings: Any) -> tuple[dict[str, Any], Any]:
    """Train on this rank; return the weights as lists, and what was sent."""
    outer = {"outer_learning_rate": RATE, "outer_momentum": MOMENTUM} if strategy == "diloco" else {}
    formation = Formation(strategy=strategy, sync_every=ROUND, **{"device": "cpu", **outer, **settings})
    model = make_model()
    prepared, optimizer = formation.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    for step in range(STEPS + 1):  # the last step begins a round that close() ends
        formation.backward(prepared(batch_of(formation.rank, step).to(formation.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    traffic = formation.strategy.comm_stats()
    formation.close()
    return {name: value.tolist() for name, value in model.state_dict().items()}, traffic


def written_out(strategy: str, workers: int = 2) -> dict[str, torch.Tensor]:
    """The published algorithm in one process, with torch's own Nesterov SGD outside."""
    center = make_model()
    outer = torch.optim.SGD(center.parameters(), RATE, momentum=MOMENTUM, nesterov=True)
    copies = [make_model() for _ in range(workers)]
    inner = [torch.optim.AdamW(copy.parameters(), 0.01) for copy in copies]
    for step in range(STEPS + 1):
        for rank, (copy, optimizer) in enumerate(zip(copies, inner, strict=True)):
            optimizer.zero_grad()
            copy(batch_of(rank, step)).square().mean().backward()
            optimizer.step()
        if (step + 1) % ROUND == 0 or step == STEPS:
            groups = zip(*(copy.parameters() for copy in copies), strict=True)
            for place, parameters in zip(center.parameters(), groups, strict=True):
                average = torch.stack([parameter.detach() for parameter in parameters]).mean(0)
                place.grad = place.detach() - average
                if strategy == "local-sgd":
                    place.data.copy_(average)
            if strategy == "diloco":
                outer.step()
            for copy in copies:
                copy.load_state_dict(center.state_dict())
    return center.state_dict()
