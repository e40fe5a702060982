"""A small Keras model, data and trainer for tests: imported by them, and by the scripts and ranks that they start."""

from __future__ import annotations

import importlib
import os
import signal
from typing import Any

import numpy as np

import phalanx

_rng = np.random.default_rng(0)
x = _rng.normal(size=(71, 8)).astype("float32")
y = _rng.integers(0, 3, size=71)


def build(library: str = "tensorflow.keras", rate: float = 1e-2) -> Any:
    """Build and compile a model of Keras 3 ("keras"), or of whichever Keras `tf.keras` is."""
    keras = importlib.import_module("keras") if library == "keras" else importlib.import_module("tensorflow").keras
    layers = [keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(rate), loss=loss, metrics=["accuracy"])
    return model


def build_deadly(where: str) -> Any:
    """Build a model whose second worker dies when the second epoch begins, the first time."""
    import tensorflow as tf

    class Die(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and os.environ["RANK"] == "1" and not os.path.exists(where):
                open(where, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    model = build()
    fit = model.fit
    model.fit = lambda *args, callbacks=(), **named: fit(*args, callbacks=[*callbacks, Die()], **named)
    return model


def trainer(model_fn: Any = build, **settings: Any) -> phalanx.TensorFlowDistributedTrainer:
    """Return a trainer of three epochs."""
    settings = {"epochs": 3, "progress": False, "run_dir": "run", **settings}
    return phalanx.TensorFlowDistributedTrainer(model_fn=model_fn, **settings)


def keep(name: str, trained: phalanx.TensorFlowDistributedTrainer) -> None:
    """Write the trained weights."""
    np.savez(name, *trained.weights)
