"""Searches on a GPU: trials that share it, one that asks for more memory than there is, weights that change hands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from packages import require

from phalanx.errors import UsageError
from phalanx.tools.tune import DistributedTuner, choice, loguniform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
require("optuna", "optuna is not installed: pip install 'phalanx[tune]'")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def train_line(config):
    """Fit a line on the trial's GPU, and leave where it was; some ask for more memory than any GPU has."""
    from phalanx import Callback, PyTorchDDPTrainer

    class TellPlace(Callback):
        def on_fit_start(self, trainer):
            place = f"{next(trainer.task.model.parameters()).device} of {os.environ['CUDA_VISIBLE_DEVICES']}"
            Path(os.environ["PHALANX_RUN_DIR"], "place").write_text(place)

    if config.get("greedy"):
        torch.empty(2**45, device="cuda")
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    torch.manual_seed(0)
    PyTorchDDPTrainer(torch.nn.Linear(4, 1), loss_fn=torch.nn.MSELoss(), optimizer="sgd", momentum=0.0, batch_size=8,
                      learning_rate=config["rate"], epochs=9, callbacks=[TellPlace()]).fit(data, data)  # fmt: skip


def test_two_trials_share_the_gpu_and_bad_ones_are_given_up():
    space = {"rate": choice([0.1, 1e-5, 3e-4, 2e-5])}
    tuner = DistributedTuner(train_line, space, metric="val/loss", search="grid", scheduler="asha", num_gpus=1,
                             trials_per_gpu=2)  # fmt: skip
    assert tuner.tune() == {"rate": 0.1}
    assert [str(trial.state) for trial in tuner.results.trials] == ["finished", "stopped", "stopped", "stopped"]
    assert [trial.steps for trial in tuner.results.trials] == [18, 2, 2, 2]
    assert {(trial.folder / "place").read_text() for trial in tuner.results.trials} == {"cuda:0 of 0"}


def test_a_trial_that_runs_out_of_the_gpus_memory_stops_nothing():
    space = {"rate": 0.1, "greedy": choice([True, False])}
    tuner = DistributedTuner(train_line, space, metric="val/loss", search="grid", trials_per_gpu=2)
    assert tuner.tune() == {"rate": 0.1, "greedy": False}
    greedy = tuner.results.trials[0]
    assert str(greedy.state) == "failed"
    assert greedy.cause.startswith("out of memory"), greedy.cause


def test_a_population_hands_weights_on():
    space = {"rate": loguniform(1e-6, 0.05)}
    tuner = DistributedTuner(
        train_line, space, metric="val/loss", scheduler="pbt", interval=3, trials_per_gpu=4, seed=3
    )
    tuner.tune(num_samples=4)
    taken = [(trial, entry["iteration"]) for trial in tuner.results.trials for entry in trial.lineage]
    assert taken, "the worst of four takes over the best at each boundary"
    for loser, epoch in taken:
        assert loser.reports[epoch + 1]["val/loss"] < loser.reports[epoch]["val/loss"]


def test_more_than_the_machine_has_is_refused():
    gpus = torch.cuda.device_count()
    tuner = DistributedTuner(train_line, {"rate": choice([0.1, 0.2])}, num_gpus=gpus + 1)
    with pytest.raises(UsageError, match=f"num_gpus = {gpus + 1}, but this machine has {gpus} GPU"):
        tuner.tune(num_samples=1)
