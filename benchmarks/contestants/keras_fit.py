"""The small perceptron as a Keras model on workers, through Phalanx."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from phalanx import TensorFlowDistributedTrainer


def build() -> Any:
    """Return the perceptron of workloads.py."""
    import tensorflow as tf

    dense = tf.keras.layers.Dense
    layers = [tf.keras.layers.Input((64,)), dense(128, "relu"), dense(128, "relu"), dense(10)]
    model = tf.keras.Sequential(layers)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.AdamW(1e-4), loss)
    return model


def run(batch_size: int, warmup: int, steps: int, ranks: int) -> dict[str, Any]:
    """Train, and return what rank.py writes of a torch model."""
    import tensorflow as tf

    clock = _Times()

    class Clock(tf.keras.callbacks.Callback):  # type: ignore[misc]
        _supports_tf_logs = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            clock.tick()

    samples = batch_size * ranks * (warmup + steps)
    draw = np.random.default_rng(0)
    data = (draw.normal(size=(samples, 64)).astype("float32"), draw.integers(0, 10, size=samples))
    trainer = TensorFlowDistributedTrainer(
        build, batch_size=batch_size, progress=False, log_every_n_steps=10 * (warmup + steps), callbacks=[Clock()]
    )
    trainer.fit(data)
    return {
        "ms_per_step": (clock.times[-1] - clock.times[warmup - 1]) / steps * 1e3,
        "first_at": clock.first_at,
        "before": 0.0,
        "after": float(sum(np.abs(weight).sum() for weight in trainer.weights)),
    }


class _Times:
    def __init__(self) -> None:
        self.times: list[float] = []
        self.first_at = 0.0

    def tick(self) -> None:
        """Note that a step is done."""
        self.first_at = self.first_at or time.time()
        self.times.append(time.perf_counter())
