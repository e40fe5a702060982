"""Data for Keras: arrays are sharded so that any number of replicas sees what one would; datasets stay as given.

The order of an epoch depends on the seed and the epoch alone, so a resumed run sees what it would have seen.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from phalanx.engines.tensorflow.data import is_arrays
from phalanx.errors import DataError, UsageError


class Feed(NamedTuple):
    """The data for `fit`, the steps per epoch (None: unknown), and the samples per step."""

    data: Any
    steps: int | None
    global_batch: int


def is_empty_dataset(data: Any) -> bool:
    """Whether a tf.data.Dataset is known to be empty."""
    return hasattr(data, "cardinality") and int(data.cardinality()) == 0


def training_feed(
    data: Any, strategy: Any, *, batch_size: int | None, seed: int, first_epoch: int, drop_last: bool | None
) -> Feed:
    """Return the training data as replicas in step take it."""
    if not is_arrays(data):
        return _as_given(data, strategy)
    batch = batch_size or _DEFAULT_BATCH
    replicas = strategy.num_replicas_in_sync
    rows, whole = len(data[0]), batch * replicas
    steps = rows // whole if drop_last else math.ceil(rows / whole)
    if steps == 0:
        raise DataError(f"{rows} samples are fewer than one global batch of {whole}, and drop_last is set")
    shards = _ShardedArrays(data, whole, replicas, steps, seed, first_epoch)
    return Feed(strategy.distribute_datasets_from_function(shards.dataset), steps, whole)


def served_feed(data: Any, strategy: Any, *, batch_size: int | None, seed: int, first_epoch: int) -> Feed:
    """Return the training data as workers of parameter servers take it: each at its own speed, a batch per step."""
    if not is_arrays(data):
        if not callable(data):
            raise UsageError(
                "parameter servers' workers make their data themselves, and a tf.data.Dataset cannot be sent to them",
                hint="Give fit() arrays, or a function that returns the dataset.",
            )
        return Feed(lambda context=None: _with_policy(data(), "OFF").repeat(), _steps_of(data()), 0)
    batch = batch_size or _DEFAULT_BATCH
    steps = math.ceil(len(data[0]) / batch)

    def worker_data(context: Any = None) -> Any:
        order = 0 if context is None else context.input_pipeline_id
        rows = tf.data.Dataset.from_tensor_slices(data)
        return rows.shuffle(len(data[0]), seed=seed + 1000 * first_epoch + order).repeat().batch(batch).prefetch(2)

    return Feed(worker_data, steps, batch)


def validation_feed(data: Any, *, batch: int | None) -> Any:
    """Return validation data as a dataset in its own order."""
    if data is None:
        return None
    if is_arrays(data):
        return _by_rows(tf.data.Dataset.from_tensor_slices(data).batch(batch or _DEFAULT_BATCH))
    return _by_rows(data() if callable(data) else data)


_DEFAULT_BATCH = 32
"""Keras' default."""


class _ShardedArrays:
    """Shards arrays: every global batch in equal parts over all replicas, in the same order everywhere."""

    def __init__(
        self, data: tuple[Any, ...], global_batch: int, replicas: int, steps: int, seed: int, first_epoch: int
    ) -> None:
        self.data = tuple(np.asarray(part) for part in data)
        self.rows = len(self.data[0])
        self.global_batch = global_batch
        self.replicas = replicas
        self.steps = steps
        self.seed = seed
        self.first_epoch = first_epoch
        last = self.rows - (steps - 1) * global_batch
        # Keras averages over a replica's rows, then over replicas: unequal parts are weighted, to give the mean of all.
        self.weighted = last < global_batch and last % replicas != 0

    def dataset(self, context: Any) -> Any:
        """Return what the replicas of this process see: for each step the part of one, then of the next."""
        here = self.replicas // context.num_input_pipelines
        first = context.input_pipeline_id * here
        tensors = tuple(tf.constant(part) for part in self.data)

        def epoch(number: Any) -> Any:
            order = tf.random.experimental.stateless_shuffle(
                tf.range(self.rows, dtype=tf.int64), seed=tf.stack([tf.constant(self.seed, tf.int64), number])
            )
            parts = tf.data.Dataset.range(self.steps * here)
            return parts.map(lambda part: self._part(tensors, order, part // here, first + part % here))

        epochs = tf.data.Dataset.range(self.first_epoch, _ENDLESS)
        return epochs.flat_map(epoch).prefetch(2 * here)

    def _part(self, tensors: tuple[Any, ...], order: Any, step: Any, replica: Any) -> Any:
        batch = order[step * self.global_batch : (step + 1) * self.global_batch]
        size = tf.shape(batch, out_type=tf.int64)[0]
        begin, end = size * replica // self.replicas, size * (replica + 1) // self.replicas
        mine = batch[begin : tf.maximum(end, tf.minimum(begin + 1, size))]
        parts = tuple(tf.gather(tensor, mine) for tensor in tensors)
        if not self.weighted:
            return parts
        # A replica without rows gets one of weight zero: it must take part in the step.
        count = tf.shape(mine)[0]
        share = tf.cast(self.replicas * (end - begin), tf.float32) / tf.cast(size, tf.float32)
        weights = tf.fill([count], share) * (tf.cast(parts[2], tf.float32) if len(parts) == 3 else 1.0)
        return parts[0], parts[1], weights


_ENDLESS = 1 << 60


def _as_given(data: Any, strategy: Any) -> Feed:
    dataset = data() if callable(data) else data
    if is_empty_dataset(dataset):
        raise DataError("the training dataset is empty")
    batch, steps = _batch_of(dataset), _steps_of(dataset)
    # Without an end: one iterator serves all epochs, each of which has its number of steps.
    endless = _by_rows(dataset.repeat() if steps is not None else dataset)
    return Feed(strategy.experimental_distribute_dataset(endless), steps, batch)


def _steps_of(dataset: Any) -> int | None:
    batches = int(dataset.cardinality())
    return batches if batches > 0 else None


def _batch_of(dataset: Any) -> int:
    """Return the samples of the dataset's first batch."""
    for element in dataset.take(1):
        first = element[0] if isinstance(element, tuple) else element
        return int(first.shape[0]) if hasattr(first, "shape") and first.shape.rank else 1
    return 0


def _by_rows(dataset: Any) -> Any:
    """Shard by rows: TensorFlow's default, by files, is not possible for most data."""
    return _with_policy(dataset, "DATA")


def _with_policy(dataset: Any, policy: str) -> Any:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
    return dataset.with_options(options)
