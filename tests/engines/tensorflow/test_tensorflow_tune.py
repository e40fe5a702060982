"""Searches over Keras models: ASHA stops all workers of a bad trial, a population copies weights and rates."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
from keras_parts import build, trainer, x, y
from long_proofs import long_proof

from phalanx.tools.tune import DistributedTuner, choice

for _package in ("optuna", "tensorflow", "tf_keras"):  # not imported here: that takes long
    if importlib.util.find_spec(_package) is None:
        pytest.skip(f"{_package} is not installed: pip install 'phalanx[tensorflow,tune]'", allow_module_level=True)

THIRD = 1e-6


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")


def train_on_workers(config):
    """Keras 2's fit for all rates but one, which a Keras 3 model has: our own loop runs there."""
    library = "keras" if config["rate"] == THIRD else "tensorflow.keras"
    settings = {"run_dir": os.environ["PHALANX_RUN_DIR"], "epochs": 4, "batch_size": 8}
    trainer(lambda: build(library, config["rate"]), **settings).fit((x, y))


@long_proof
def test_asha_stops_all_workers_of_a_bad_trial():
    space = {"rate": choice([0.01, 1e-5, THIRD])}
    tuner = DistributedTuner(train_on_workers, space, metric="train/loss", search="grid", scheduler="asha", parallel=1,
                             backend="tensorflow", num_workers=2)  # fmt: skip
    assert tuner.tune() == {"rate": 0.01}
    states = [(str(trial.state), trial.cause) for trial in tuner.results.trials]
    assert states == [("finished", ""), ("stopped", ""), ("stopped", "")]
    epochs = [len(trial.reports) for trial in tuner.results.trials]
    assert epochs == [4, 1, 1], "six epochs of twelve were saved"
    assert [trial.steps for trial in tuner.results.trials] == [20, 5, 5]
    said = (tuner.results.trials[2].folder / "events.jsonl").read_text()
    assert "phalanx' own loop" in said


def train_and_watch(config):
    """Leave what each generation began and ended with in the trial's folder; after an epoch the rate is halved."""
    import tensorflow as tf

    folder = Path(os.environ["PHALANX_RUN_DIR"])

    class Watch(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            np.savez(folder / f"first-{epoch}.npz", *self.model.get_weights())
            (folder / f"rate-{epoch}").write_text(repr(float(self.model.optimizer.learning_rate.numpy())))

        def on_epoch_end(self, epoch, logs=None):
            np.savez(folder / f"last-{epoch + 1}.npz", *self.model.get_weights())
            rate = self.model.optimizer.learning_rate
            rate.assign(rate / 2)

    settings = {"run_dir": str(folder), "epochs": 2, "batch_size": 16, "seed": int(os.environ["PHALANX_TRIAL"])}
    fitted = trainer(lambda: build(rate=config["rate"]), callbacks=[Watch()], **settings)
    fitted.fit((x, y))


def load(trial, name):
    with np.load(trial.folder / f"{name}.npz") as arrays:
        return [arrays[part] for part in arrays.files]


def rate_of(trial, epoch):
    return float((trial.folder / f"rate-{epoch}").read_text())


@long_proof
def test_a_population_copies_weights_and_each_member_keeps_its_rate(monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")  # as on several workers: TensorFlow need not be imported again
    space = {"rate": choice([0.01, 1e-6])}
    tuner = DistributedTuner(train_and_watch, space, metric="train/loss", search="grid", scheduler="pbt", parallel=2,
                             backend="tensorflow")  # fmt: skip
    tuner.tune()
    results = tuner.results
    assert [(str(trial.state), trial.iteration) for trial in results.trials] == [("finished", 2), ("finished", 2)]
    taken = [(trial, entry) for trial in results.trials for entry in trial.lineage]
    assert len(taken) == 1, "one of two, at the only boundary"
    for loser, entry in taken:
        epoch, winner = entry["iteration"], results.trials[entry["from"]]
        then, best, own = load(loser, f"first-{epoch}"), load(winner, f"last-{epoch}"), load(loser, f"last-{epoch}")
        assert all(np.array_equal(a, b) for a, b in zip(then, best, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(then, own, strict=True))
        assert rate_of(loser, epoch) == pytest.approx(entry["params"]["rate"]), "not what became of the winner's"
    (kept,) = [trial for trial in results.trials if not trial.lineage]
    assert rate_of(kept, 1) == pytest.approx(rate_of(kept, 0) / 2), "what a callback made of it"
