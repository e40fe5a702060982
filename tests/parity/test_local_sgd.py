"""local-sgd and diloco: against ddp, against the algorithm in one process, and across a stop and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import assert_same, train
from torch.utils.data import DataLoader, TensorDataset

from phalanx import DistributedConfig, Formation
from phalanx.loop.task import TrainTask
from phalanx.trainers.job import Job, run_job

STEPS, ROUND, RATE, MOMENTUM = 8, 4, 0.6, 0.8


def average_every_step(folder: str) -> None:
    settings = {"optimizer": "sgd", "momentum": 0.0, "batch_size": 4}
    expected, *_ = train(f"{folder}/ddp", **settings)
    found, *_ = train(f"{folder}/local", strategy="local-sgd", sync_every=1, **settings)
    assert_same(expected, found, 1e-10)


def test_averaging_weights_in_every_step_equals_averaging_gradients(ranks, tmp_path):
    ranks(average_every_step, str(tmp_path), world_size=2)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step)).double()


def train_by_formation(strategy: str) -> tuple[dict[str, Any], Any]:
    settings: dict[str, Any] = {"outer_learning_rate": RATE, "outer_momentum": MOMENTUM} if strategy == "diloco" else {}
    formation = Formation(strategy=strategy, sync_every=ROUND, device="cpu", **settings)
    model = make_model()
    prepared, optimizer = formation.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    for step in range(STEPS + 1):  # the last step begins a round that close() ends
        formation.backward(prepared(batch_of(formation.rank, step)).square().mean())
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


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_weights_equal_the_algorithm_in_one_process(ranks, strategy):
    (first, traffic), (second, _) = ranks(train_by_formation, strategy, world_size=2)
    assert first == second, "all ranks end with one model"
    for name, expected in written_out(strategy).items():
        torch.testing.assert_close(torch.tensor(first[name], dtype=torch.float64), expected, rtol=0, atol=1e-10)
    assert traffic.sent_bytes == traffic.plain_bytes * 2 // (STEPS + 1), "two averages instead of nine"


def resume(folder: str, strategy: str) -> None:
    def fit(steps: int, where: str, *, from_checkpoint: bool) -> dict[str, torch.Tensor]:
        model = make_model()
        data = TensorDataset(
            torch.randn(64, 6, generator=torch.Generator().manual_seed(7)).double(), torch.zeros(64, 2)
        )
        config = DistributedConfig(
            strategy=strategy,
            sync_every=3,
            batch_size=4,
            max_steps=steps,
            device="cpu",
            progress=False,
            checkpoint_dir=f"{folder}/{where}",
            checkpoint_frequency="4 steps",
            resume_from_checkpoint=from_checkpoint,
        )
        loss = lambda output, target: (output - target).square().mean()  # noqa: E731
        task = TrainTask(model, DataLoader(data, shuffle=True), None, loss)
        run_job(Job("fit", task, config, Path(folder) / "run"), in_place=True)
        return model.state_dict()

    whole = fit(8, "whole", from_checkpoint=False)
    fit(4, "parts", from_checkpoint=False)
    parts = fit(8, "parts", from_checkpoint=True)
    for name, value in whole.items():
        assert torch.equal(parts[name], value), name


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_stop_and_resume_give_the_same_bits(ranks, tmp_path, strategy):
    ranks(resume, str(tmp_path), strategy, world_size=2)


def change_strategy(folder: str) -> list[str]:
    settings: dict[str, Any] = {"batch_size": 4, "checkpoint_dir": folder, "checkpoint_frequency": "4 steps"}
    train(f"{folder}/run", strategy="ddp", max_steps=4, **settings)
    formation_notes: list[str] = []
    original = Formation.load

    def load(self: Formation, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        formation_notes.extend(self.notes)
        return found

    Formation.load = load  # type: ignore[method-assign]
    train(f"{folder}/run2", strategy="diloco", max_steps=6, resume_from_checkpoint=True, **settings)
    return formation_notes


def test_a_checkpoint_of_ddp_continues_under_diloco(ranks, tmp_path):
    notes = ranks(change_strategy, str(tmp_path), world_size=2)[0]
    assert any("outer starts afresh" in note for note in notes)
