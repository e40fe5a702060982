"""The tf.distribute strategies by name, and a training loop for several processes, where Keras' `fit` fails."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from phalanx.config import DistributedConfig
from phalanx.config.settings import precision_name
from phalanx.engines.tensorflow.callbacks import KerasReport, epoch_loss, rate_of
from phalanx.engines.tensorflow.feeds import Feed
from phalanx.engines.tensorflow.tf_config import read_task
from phalanx.errors import UsageError


def make_strategy(config: DistributedConfig) -> Any:
    """Return the tf.distribute strategy that the config asks for; it must be made before anything else runs."""
    if config.device == "cpu":
        _hide_gpus()
    task = read_task()
    if task is None:
        return tf.distribute.MirroredStrategy(_devices(config))
    return _strategy_of_cluster(task.to_json())


@functools.cache
def _strategy_of_cluster(task: str) -> Any:
    """Return the strategy of this process's task. Cached: a second one would reset connections in use."""
    if "ps" not in json.loads(task)["cluster"]:
        return tf.distribute.MultiWorkerMirroredStrategy()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tf.distribute.ParameterServerStrategy(resolver)


def _hide_gpus() -> None:
    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError as error:  # TensorFlow has looked at its devices already
        if tf.config.get_visible_devices("GPU"):
            raise UsageError(
                f"device = 'cpu', but TensorFlow uses the GPU already ({error})",
                hint="Make the trainer before anything is computed, or set CUDA_VISIBLE_DEVICES=-1.",
            ) from error


def _devices(config: DistributedConfig) -> list[str]:
    """Return one device per replica: GPUs, or logical CPUs."""
    gpus = tf.config.list_logical_devices("GPU") if tf.config.list_physical_devices("GPU") else []
    replicas = config.total_ranks
    if gpus and config.device != "cpu":
        if replicas is not None and replicas > len(gpus):
            raise UsageError(
                f"{replicas} replicas were asked for, and TensorFlow sees {len(gpus)} GPU{'s' * (len(gpus) != 1)}",
                hint=f"Ask for at most {len(gpus)}, or run on the CPU with device='cpu'.",
            )
        return [f"GPU:{number}" for number in range(replicas or len(gpus))]
    return _logical_cpus(replicas or 1)


def _logical_cpus(count: int) -> list[str]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    if count > 1:
        with contextlib.suppress(RuntimeError):  # an earlier run may have made them already
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    have = len(tf.config.list_logical_devices("CPU"))
    if have < count:
        raise UsageError(
            f"{count} replicas on the CPU need {count} logical devices, and TensorFlow has made {have} already",
            hint="Call fit() before anything is computed with TensorFlow in this process, or write strategy = "
            "'multiworker': each replica is a process then.",
        )
    return [f"CPU:{number}" for number in range(count)]


def set_precision(config: DistributedConfig, keras: Any, device: str) -> None:
    """Set Keras' mixed precision, where it is asked for."""
    name = precision_name(config.mixed_precision, device)
    if name != "fp32":
        keras.mixed_precision.set_global_policy("mixed_float16" if name == "fp16" else "mixed_bfloat16")


def device_kind(config: DistributedConfig) -> str:
    """Return "cuda" or "cpu": the device of this process."""
    if config.device == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == "-1":
        return "cpu"
    return "cuda" if tf.config.list_physical_devices("GPU") else "cpu"


class OwnLoop:
    """Trains a compiled model of Keras 3 on several workers, or of either Keras around parameter servers."""

    def __init__(
        self, keras: Any, model: Any, strategy: Any, feed: Feed, val: Any, report: KerasReport, callbacks: list[Any]
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
        step = self._make_step()
        callbacks.on_train_begin()
        for epoch in range(first_epoch, epochs):
            model.reset_metrics()
            self.report.begin_epoch(epoch)
            callbacks.on_epoch_begin(epoch)
            for batch in range(self.feed.steps or 0):
                callbacks.on_train_batch_begin(batch)
                step()
                self.report.end_step(batch, self._loss, lambda: rate_of(model))
                callbacks.on_train_batch_end(batch)
                if max_steps is not None and self.report.step >= max_steps:
                    model.stop_training = True
                if model.stop_training:
                    break
            self._join()
            logs = {name: float(value) for name, value in model.get_metrics_result().items()}
            logs |= self._evaluate()
            self.report.end_epoch(epoch, logs, rate_of(model))
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        callbacks.on_train_end()

    def _loss(self) -> float:
        self._join()
        return epoch_loss(self.model)

    @property
    def _uses_servers(self) -> bool:
        return isinstance(self.strategy, tf.distribute.ParameterServerStrategy)

    def _make_step(self) -> Callable[[], None]:
        """Return a function that takes one step; with servers any free worker takes it, and `_join` waits for all."""
        strategy, model = self.strategy, self.model

        @tf.function  # type: ignore[untyped-decorator]
        def step(iterator: Any) -> None:
            strategy.run(model.train_step, args=(next(iterator),))

        if not self._uses_servers:
            batches = iter(self.feed.data)
            return lambda: step(batches)

        @tf.function  # type: ignore[untyped-decorator]
        def worker_data() -> Any:
            return strategy.distribute_datasets_from_function(self.feed.data)

        self._coordinator = coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        served = iter(coordinator.create_per_worker_dataset(worker_data))
        return lambda: coordinator.schedule(step, args=(served,))

    def _join(self) -> None:
        if self._uses_servers:
            self._coordinator.join()

    def _evaluate(self) -> dict[str, float]:
        if self.val is None:
            return {}
        model, strategy = self.model, self.strategy
        model.reset_metrics()
        self.report.begin_evaluation()
        if self._uses_servers:  # the chief evaluates alone: the workers hold training data
            for batch in self.val:
                model.test_step(batch)
        else:
            if self._test is None:
                self._test = tf.function(lambda batch: strategy.run(_test_rows, args=(model, batch)))
            for batch in strategy.experimental_distribute_dataset(self.val):
                self._test(batch)
        self.report.end_evaluation()
        metrics = {f"val_{name}": float(value) for name, value in model.get_metrics_result().items()}
        model.reset_metrics()
        return metrics


def _test_rows(model: Any, batch: Any) -> None:
    """Evaluate a replica's rows; in the last batch some replicas may have none, and their mean would be NaN."""

    def evaluate() -> Any:
        model.test_step(batch)
        return tf.constant(True)

    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    tf.cond(rows > 0, evaluate, lambda: tf.constant(False))
