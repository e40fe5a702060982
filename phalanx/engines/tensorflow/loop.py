"""A loop for several processes, where Keras' own `fit` fails: the model's train_step and callbacks, in our loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.engines.tensorflow.callbacks import KerasReport, epoch_loss, rate_of
from phalanx.engines.tensorflow.data import Feed


class OwnLoop:
    """Trains a compiled model of Keras 3 on several workers, or of either Keras around parameter servers."""

    def __init__(
        self,
        keras: Any,
        model: Any,
        strategy: Any,
        feed: Feed,
        val: Any,
        report: KerasReport,
        callbacks: list[Any],
    ) -> None:
        self.model = model
        self.strategy = strategy
        self.feed = feed
        self.val = val
        self.report = report
        self._keras = keras
        self._test: Any = None
        self._coordinator: Any = None
        self._own_callbacks = callbacks

    def run(self, first_epoch: int, epochs: int, max_steps: int | None) -> None:
        """Train from an epoch to the last."""
        model = self.model
        callbacks = self._keras.callbacks.CallbackList(
            self._own_callbacks, model=model, epochs=epochs, steps=self.feed.steps, verbose=0
        )
        with self.strategy.scope():
            model.optimizer.build(model.trainable_variables)
        model.stop_training = False
        step = self._server_step() if self._serves else self._step()
        callbacks.on_train_begin()
        for epoch in range(first_epoch, epochs):
            model.reset_metrics()
            self.report.begin_epoch(epoch)
            callbacks.on_epoch_begin(epoch)
            for batch in self._batches():
                callbacks.on_train_batch_begin(batch)
                step()
                self.report.end_step(batch, self._loss, lambda: rate_of(model))
                callbacks.on_train_batch_end(batch)
                if max_steps is not None and self.report.step >= max_steps:
                    model.stop_training = True
                if model.stop_training:
                    break
            self._meet()
            logs = {name: float(value) for name, value in model.get_metrics_result().items()}
            logs |= self._evaluate()
            self.report.end_epoch(epoch, logs, rate_of(model))
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        callbacks.on_train_end()

    def _loss(self) -> float:
        self._meet()
        return epoch_loss(self.model)

    @property
    def _serves(self) -> bool:
        import tensorflow as tf

        return isinstance(self.strategy, tf.distribute.ParameterServerStrategy)

    def _batches(self) -> Iterator[int]:
        """Count an epoch's steps; a stream without a length is asked for the next batch by the step itself."""
        assert self.feed.steps is not None, "checked before the loop was made"
        yield from range(self.feed.steps)

    def _step(self) -> Callable[[], None]:
        import tensorflow as tf

        strategy, model = self.strategy, self.model
        batches = iter(self.feed.data)

        @tf.function  # type: ignore[untyped-decorator]
        def step(iterator: Any) -> None:
            strategy.run(model.train_step, args=(next(iterator),))

        return lambda: step(batches)

    def _server_step(self) -> Callable[[], None]:
        """Return what hands a step to whichever worker is free; `_meet` waits for all of them."""
        import tensorflow as tf

        strategy, model = self.strategy, self.model
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

        @tf.function  # type: ignore[untyped-decorator]
        def step(iterator: Any) -> None:
            strategy.run(model.train_step, args=(next(iterator),))

        @tf.function  # type: ignore[untyped-decorator]
        def worker_data() -> Any:
            return strategy.distribute_datasets_from_function(self.feed.data)

        batches = iter(coordinator.create_per_worker_dataset(worker_data))
        self._coordinator = coordinator
        return lambda: coordinator.schedule(step, args=(batches,))

    def _meet(self) -> None:
        if self._serves:
            self._coordinator.join()

    def _evaluate(self) -> dict[str, float]:
        if self.val is None:
            return {}
        import tensorflow as tf

        model, strategy = self.model, self.strategy
        model.reset_metrics()
        self.report.begin_evaluation()
        if self._serves:  # the chief evaluates by itself: the workers hold training data
            for batch in self.val:
                model.test_step(batch)
        else:
            if self._test is None:
                self._test = tf.function(lambda batch: strategy.run(_test_rows, args=(model, batch)))
            for batch in strategy.experimental_distribute_dataset(self.val):
                self._test(batch)
        self.report.end_evaluation()
        found = {f"val_{name}": float(value) for name, value in model.get_metrics_result().items()}
        model.reset_metrics()
        return found


def _test_rows(model: Any, batch: Any) -> None:
    """Evaluate a replica's rows; of the last batch some replicas may have none, whose mean would be no number."""
    import tensorflow as tf

    def evaluate() -> Any:
        model.test_step(batch)
        return tf.constant(True)

    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    tf.cond(rows > 0, evaluate, lambda: tf.constant(False))


class OwnBackup:
    """What BackupAndRestore does, for the own loop: weights, optimizer and epoch in TensorFlow's checkpoints."""

    def __init__(self, model: Any, directory: Path, *, leads: bool) -> None:
        import tensorflow as tf

        self._epoch = tf.Variable(-1, dtype=tf.int64, trainable=False)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, ckpt_saved_epoch=self._epoch)
        shared = directory / "chief"
        # All workers must take part in a save; those that do not lead write where nobody looks.
        own = shared if leads else directory / f".scratch-{os.getpid()}"
        self._leads = leads
        self._writer = tf.train.CheckpointManager(checkpoint, str(own), max_to_keep=2)
        self._latest = tf.train.latest_checkpoint(str(shared))
        self._checkpoint = checkpoint

    def restore(self) -> None:
        """Load the newest backup, if there is one."""
        if self._latest is not None:
            self._checkpoint.restore(self._latest).assert_existing_objects_matched()

    def save(self, epoch: int) -> None:
        """Keep the state after an epoch."""
        import shutil

        self._epoch.assign(epoch)
        self._writer.save()
        if not self._leads:
            shutil.rmtree(self._writer.directory, ignore_errors=True)
