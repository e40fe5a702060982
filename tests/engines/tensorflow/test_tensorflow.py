"""Keras models on replicas, workers and parameter servers: real TensorFlow, real processes."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pytest
from command import ROOT, finish, phalanx, start
from keras_parts import build_deadly, trainer, x, y
from long_proofs import long_proof
from ranks import warm_pid

if TYPE_CHECKING:
    from pathlib import Path

# Not importorskip: TensorFlow takes long to import, and only the tests' own processes need it.
if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed: pip install 'phalanx[tensorflow]'", allow_module_level=True)


PARTS = f"import os\nimport sys\nsys.path.insert(0, {str(ROOT / 'tests' / 'helpers')!r})\nfrom keras_parts import *\n"
PATH = f"{ROOT}:{ROOT / 'tests/helpers'}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: None) -> Path:
    """The working folder of ranks that are forked from the tests' own fork server: TensorFlow is imported once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed TensorFlow leaves files behind
    return tmp_path


def weights(path: Path) -> list[np.ndarray]:
    with np.load(path) as arrays:
        return [arrays[name] for name in arrays.files]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True))


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process: one replica, then two, a stop after an epoch and a resumption, and what can be asked afterwards."""
    folder = tmp_path_factory.mktemp("mirrored")
    script = folder / "script.py"
    script.write_text(
        PARTS
        + textwrap.dedent(
            """
        # First of all: the logical CPUs can be made only before TensorFlow computes.
        one = trainer(strategy="mirrored", num_workers=2, batch_size=8, tensorboard=True)
        history = one.fit((x, y), (x[:33], y[:33]))
        keep("two.npz", one)
        two = trainer(strategy="mirrored", num_workers=1, batch_size=16, run_dir="one")
        two.fit((x, y))
        keep("one.npz", two)
        half = trainer(strategy="mirrored", batch_size=16, epochs=2, run_dir="half", checkpoint_dir="kept")
        half.fit((x, y))
        rest = trainer(strategy="mirrored", batch_size=16, run_dir="rest", checkpoint_dir="kept",
                       resume_from_checkpoint=True)
        print("resumed epochs", [record.epoch for record in rest.fit((x, y)).epochs])
        keep("resumed.npz", rest)
        cut = {"strategy": "mirrored", "batch_size": 16, "checkpoint_dir": "cut"}
        trainer(max_steps=7, run_dir="begun", **cut).fit((x, y))  # of 5 steps an epoch
        mended = trainer(run_dir="mended", resume_from_checkpoint=True, **cut)
        print("after the cut", [record.step for record in mended.fit((x, y)).epochs])
        keep("cut.npz", mended)
        found = one.evaluate((x[:33], y[:33]))
        print("agree", abs(found["accuracy"] - history.epochs[-1].val["accuracy"]) < 1e-6)
        one.save("weights.weights.h5")
        fresh = trainer()
        fresh.load("weights.weights.h5")
        print("loaded", np.array_equal(fresh.model.get_weights()[0], one.model.get_weights()[0]))
        print("shape", one.predict(x[:5]).shape, "best", one.best_accuracy == history.best_accuracy)
        try:
            half.fit((x, y))
        except phalanx.PhalanxError as error:
            print("refused:", error.message)
        low = trainer(strategy="mirrored", batch_size=16, epochs=1, mixed_precision="bf16", run_dir="low")
        low.fit((x, y))
        print("policy", low.model.layers[0].dtype_policy.name)
        number = trainer(model_fn=lambda: 3)
        for data in ((x, y[:3]), [1], (x, [1]), None):
            try:
                low.fit(data) if data else number.fit((x, y))
            except phalanx.PhalanxError as error:
                print("refused:", error.message)

        import keras
        import tensorflow as tf

        rate = keras.optimizers.schedules.CosineDecay(0.0, decay_steps=9, warmup_target=0.001, warmup_steps=3)
        keras.optimizers.Adam(rate, global_clipnorm=1.0)
        adam = keras.optimizers.Adam(0.1, gradient_accumulation_steps=4)
        keras.optimizers.schedules.PolynomialDecay(0.001, decay_steps=1000, end_learning_rate=0.0)
        keras.mixed_precision.LossScaleOptimizer(adam, initial_scale=2.0, dynamic_growth_steps=3)
        with keras.RematScope(mode="full"):
            layer = keras.layers.Dense(4)
        layer.build((None, 4))
        layer.enable_lora(2)
        print("Keras takes what is written instead of our settings")

        strategy = tf.distribute.MirroredStrategy(["CPU:0"])
        with strategy.scope():
            layers = [tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(2)]
            model = tf.keras.Sequential(layers)
            model.compile(optimizer="adam", loss="mse")
        data = tf.data.Dataset.from_tensor_slices((np.ones((8, 4), "float32"), np.zeros((8, 2), "float32")))
        model.fit(data.batch(4), epochs=2, verbose=2)
        """
        )
    )
    words = ("train", "--backend", "tensorflow", "--script", script)
    done = finish(start(*words, cwd=folder, TMPDIR=str(folder), PYTHONPATH=PATH))
    assert done.code == 0, done.text[-3000:]
    (folder / "out").write_text(done.out)
    return folder


def test_two_replicas_equal_one_and_a_resumed_run_an_unbroken_one(mirrored):
    one = weights(mirrored / "one.npz")
    assert equal(one, weights(mirrored / "two.npz"))
    assert equal(one, weights(mirrored / "resumed.npz"))
    assert equal(one, weights(mirrored / "cut.npz"))
    out = (mirrored / "out").read_text()
    assert "resumed epochs [3]" in out
    assert "after the cut [10, 15]" in out


def test_the_api_is_that_of_the_other_trainers(mirrored):
    out = (mirrored / "out").read_text()
    for words in ("agree True", "loaded True", "shape (5, 3) best True", "policy mixed_bfloat16"):
        assert words in out
    assert "refused: train has arrays of 3 and 71 rows" in out
    assert "refused: model_fn returned an int" in out
    assert "refused: train is a list" in out
    assert "refused: train[1] is a list, not an array" in out
    assert "refused: kept/half holds the backup of an earlier run" in out
    assert "Keras takes what is written instead of our settings" in out


def test_events_and_tensorboard_are_written(mirrored):
    kinds = [event["event"] for event in events(mirrored / "run")]
    assert kinds[0] == "run_started"
    assert kinds[-1] == "run_ended"
    assert kinds.count("epoch") == 3
    first = events(mirrored / "run")[0]
    assert (first["world_size"], first["global_batch"], first["strategy"]) == (2, 16, "tensorflow mirrored")
    assert list((mirrored / "run").glob("events.out.tfevents.*"))
    assert (mirrored / "run" / "config.toml").exists()


def test_two_workers_equal_one_process_although_one_is_killed(mirrored, here):
    """Keras 2's fit: worker 1 dies in the second epoch; all start again from the backup of the first."""
    deadly = functools.partial(build_deadly, str(here / "died"))
    two = trainer(model_fn=deadly, strategy="multiworker", num_workers=2, batch_size=8, max_restarts=1)
    two.fit((x, y), (x[:33], y[:33]))
    assert (here / "died").exists()
    assert equal(weights(mirrored / "one.npz"), two.weights)
    emitted = events(here / "run")
    assert json.loads((here / "run" / "run.json").read_text())["outcome"] == "finished"
    assert [event["epoch"] for event in emitted if event["event"] == "epoch"] == [1, 2, 3]
    assert any("Keras 2 (tf_keras)" in event.get("text", "") for event in emitted)
    first, reference = (
        next(event["loss"] for event in found if event["event"] == "step")
        for found in (emitted, events(mirrored / "run"))
    )
    assert first == pytest.approx(reference, rel=1e-4)


@long_proof
def test_keras_3_models_train_on_workers_by_the_own_loop(mirrored, here):
    """In ranks that `phalanx train` started: arrays, then a dataset of several epochs in the same processes."""
    script = here / "train.py"
    script.write_text(
        PARTS
        + textwrap.dedent(
            """
            two = trainer(model_fn=lambda: build("keras"), batch_size=8)
            two.fit((x, y), (x[:33], y[:33]))
            if os.environ["RANK"] == "0":
                keep("two.npz", two)

            def dataset():
                import tensorflow as tf

                return tf.data.Dataset.from_tensor_slices((x[:64], y[:64])).batch(16)

            again = trainer(model_fn=lambda: build("keras"), run_dir="again").fit(dataset)
            print("steps", [record.step for record in again.epochs])
            """
        )
    )
    words = "--backend tensorflow --num-workers 2 --run-dir run"
    done = phalanx("train", "--script", script, *words.split())
    assert done.code == 0, done.text[-3000:]
    assert "steps [4, 8, 12]" in done.out
    assert equal(weights(mirrored / "one.npz"), weights(here / "two.npz"))
    ours, theirs = (
        [event["val"] for event in events(path) if event["event"] == "epoch"]
        for path in (here / "run", mirrored / "run")
    )
    assert ours == [pytest.approx(values, rel=1e-4) for values in theirs]
    assert any("phalanx' own loop" in event.get("text", "") for event in events(here / "run"))


def test_a_script_trains_with_parameter_servers(here):
    """`phalanx train` starts a chief, two workers and a server; the trainer in the script joins them."""
    script = here / "train.py"
    script.write_text(
        PARTS
        + textwrap.dedent(
            """
            served = phalanx.TensorFlowDistributedTrainer(model_fn=build)
            history = served.fit((x, y), (x[:33], y[:33]))
            print("epochs", len(history.epochs), os.environ["TF_CONFIG"])
            """
        )
    )
    words = "--backend tensorflow --strategy parameter-server --num-workers 2 --num-servers 1 --epochs 5 --batch-size 8"
    done = phalanx("train", "--script", script, *words.split(), "--run-dir", "run")
    assert done.code == 0, done.text[-3000:]
    assert "epochs 5" in done.out
    emitted = events(here / "run")
    losses = [event["train_loss"] for event in emitted if event["event"] == "epoch"]
    assert losses[-1] < losses[0]
    assert emitted[0]["strategy"] == "tensorflow parameter-server"
    assert len(os.listdir(f"/proc/{warm_pid()}/task")) == 1, "a thread would not survive the fork"


def test_the_classic_form_runs_as_it_is(mirrored):
    """A strategy, a scope and a fit of the user's own, in a script that `phalanx train` runs."""
    assert "Epoch 2/2" in (mirrored / "out").read_text()
