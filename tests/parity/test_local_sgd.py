"""local-sgd and diloco: against ddp, against the algorithm in one process, and across a stop and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import assert_same, train
from outer_rounds import STEPS, make_model, train_by_formation, written_out
from torch.utils.data import DataLoader, TensorDataset

from phalanx import DistributedConfig, Formation
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job


def average_every_step(folder: str) -> None:
    settings = {"optimizer": "sgd", "momentum": 0.0, "batch_size": 4}
    expected, *_ = train(f"{folder}/ddp", **settings)
    found, *_ = train(f"{folder}/local", strategy="local-sgd", sync_every=1, **settings)
    assert_same(expected, found, 1e-10)


def test_averaging_weights_in_every_step_equals_averaging_gradients(ranks, tmp_path):
    ranks(average_every_step, str(tmp_path), world_size=2)


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
        Job("fit", task, config, Path(folder) / "run").run()
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
