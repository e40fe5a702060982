"""The best checkpoint, early stopping and the time limit on two ranks: one decision, whole or sharded weights."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import Callback
from phalanx.checkpoint import find_best
from phalanx.config import DistributedConfig
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.run.weights import load_weights, whole_weights


class SlowOnRankOne(Callback):
    """One rank's clock and pace must not decide for it alone."""

    def on_step_end(self, trainer, info):
        if trainer.formation.rank == 1:
            time.sleep(0.02)


def train(folder: str, callbacks: tuple = (), dropout: float = 0.0, **settings):
    """Return the history, the number of steps and the whole weights of this rank."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :3].argmax(1))
    config = DistributedConfig(device="cpu", progress=False, run_dir=folder, **{"batch_size": 8, **settings})
    task = TrainTask(model, data, data, callbacks=list(callbacks))
    history = Job("fit", task, config).run().history
    return history, whole_weights(model)


STRATEGIES = ["ddp", "fsdp", "local-sgd"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_best_checkpoint_has_the_weights_that_were_evaluated(ranks, tmp_path, strategy):
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "keep_last": 1, "strategy": strategy}
    sync = {"sync_every": 2} if strategy == "local-sgd" else {}
    # The lowest accuracy is that of an early epoch, which keep_last would have removed.
    settings = {"learning_rate": 0.05, "epochs": 5, "keep_best": "min:val/accuracy", **kept, **sync}
    found = ranks(lambda: train(str(tmp_path / "run"), **settings), world_size=2)
    accuracies = [record.val["accuracy"] for record in found[0][0].epochs]
    step = found[0][0].epochs[accuracies.index(min(accuracies))].step
    assert [history.best_step for history, _ in found] == [step, step]
    best = find_best(tmp_path / "kept")
    assert (best.step, best.value) == (step, min(accuracies))
    assert len(list((tmp_path / "kept").glob("step-*"))) == 1 + (step != found[0][0].epochs[-1].step)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 3))
    load_weights(model, best.path)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    assert (model(x).argmax(1) == x[:, :3].argmax(1)).double().mean().item() == pytest.approx(best.value)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_evaluation_inside_an_epoch_changes_no_bit_of_training(ranks, tmp_path, strategy):
    def both():
        settings = {"strategy": strategy, "epochs": 2, "batch_size": 2, "dropout": 0.5, "learning_rate": 0.05}
        history, often = train(str(tmp_path / "often"), eval_every=0.25, **settings)
        _, never = train(str(tmp_path / "never"), eval_every=0, **settings)
        return history, often, never

    for history, often, never in ranks(both, world_size=2):
        assert [each["step"] for each in history.evaluations] == [2, 4, 6, 10, 12, 14]
        assert all(torch.equal(often[name], never[name]) for name in often)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_have_the_best_weights_at_the_end(ranks, tmp_path, strategy):
    settings = {"strategy": strategy, "learning_rate": 0.05, "epochs": 3, "keep_best": "max:val/loss"}
    settings |= {"load_best_at_end": True, "eval_every": "1 steps", "batch_size": 4}
    found = ranks(lambda: train(str(tmp_path / "run"), **settings), world_size=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 3))
    load_weights(model, find_best(tmp_path / "run/checkpoints").path)
    for history, weights in found:
        assert (history.best_step, history.loaded_best, history.epochs[-1].step) == (1, True, 12)
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_all_ranks_stop_early_after_the_same_evaluation(ranks, tmp_path):
    settings = {"early_stopping": "max:val/loss", "patience": 2, "epochs": 20, "learning_rate": 0.05}
    found = ranks(lambda: train(str(tmp_path / "run"), (SlowOnRankOne(),), **settings), world_size=2)
    assert [len(history.epochs) for history, _ in found] == [3, 3]
    assert {history.reason for history, _ in found} == {"early stopping, val/loss has not improved for 2 evaluations"}


def test_all_ranks_end_at_the_same_step_when_the_time_is_over(ranks, tmp_path):
    settings = {"max_time": "1s", "epochs": 10_000, "checkpoint_dir": str(tmp_path / "kept"), "eval_every": 0}
    found = ranks(
        lambda: train(str(tmp_path / "run"), (SlowOnRankOne(),), checkpoint_frequency="10000 steps", **settings),
        world_size=2,
    )
    (first, ours), (second, theirs) = found
    assert first.reason == second.reason == "max_time of 1.0 s reached"
    assert first.checkpoint == second.checkpoint is not None
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
