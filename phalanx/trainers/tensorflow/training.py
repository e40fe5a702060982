"""A rank's training: the strategy, the model in its scope, the data, and the `fit` that runs there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from phalanx.config.settings import precision_name
from phalanx.errors import ModelError, PreemptedError, UsageError
from phalanx.loop.reporting import tensorboard_dir
from phalanx.observe.events import RunStarted
from phalanx.observe.folders import make_private
from phalanx.observe.stream import EventStream
from phalanx.runs.folder import make_run_dir
from phalanx.trainers.session import open_sinks, save_config
from phalanx.trainers.tensorflow import backup, reporting
from phalanx.trainers.tensorflow.feeding import served_feed, training_feed, validation_feed
from phalanx.trainers.tensorflow.fitting import choose, keras_of
from phalanx.trainers.tensorflow.stopping import stopping
from phalanx.trainers.tensorflow.strategies import device_kind, make_strategy, set_precision
from phalanx.trainers.tensorflow.task import KerasResult
from phalanx.world.env import read_rank_env
from phalanx.world.tf_config import read_task

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.config import DistributedConfig
    from phalanx.trainers.tensorflow.feeding import Feed
    from phalanx.trainers.tensorflow.task import KerasJob, KerasTask


def train(job: KerasJob) -> tuple[Any, KerasResult]:
    """Train on this rank; return the model and what is handed back."""
    config = job.config
    env = read_rank_env()
    task = read_task()
    leads = task is None or task.leads
    run_dir = job.run_dir or make_run_dir(config, job.task.name)
    strategy = make_strategy(config)
    device = device_kind(config)
    with strategy.scope():
        model = _built(job.task, config, device)
    directory = backup.backup_dir(config, run_dir, 0 if env is None else env.attempt)
    if directory is not None:
        make_private(directory.parent)
    start = backup.start_of(directory)
    feed = _feed(job, strategy, start)
    first_step = start.epoch * (feed.steps or 0)
    started = _started(job, model, strategy, feed, run_dir, device, first_step, str(directory) if start.epoch else None)
    if leads:
        save_config(config, run_dir)
    events = EventStream(open_sinks(config, run_dir) if leads else [])
    report = reporting.KerasReport(config, events, started, feed.steps or 0)
    fitting = choose(model, strategy)
    try:
        report.begin()
        report.say(fitting.says)
        if config.unused_note:
            report.say(config.unused_note, "warning")
        val = validation_feed(job.task.val, batch=feed.global_batch or None)
        with stopping(report):
            fitting.run(job, feed, val, directory, start, report, leads=leads)
        report.end()
    except PreemptedError:
        report.end("preempted")
        raise
    except BaseException:
        report.end("failed")
        raise
    finally:
        events.close()
    return model, KerasResult(report.history, model.get_weights())


def _built(task: KerasTask, config: DistributedConfig, device: str) -> Any:
    """Build and compile the model with the seed and the precision of the run.

    Where `tf.keras` is Keras 2, Keras 3 may be imported by `model_fn` itself: that draws from the seeded numbers, and
    nobody has told it the precision, so the model is built once more.
    """
    loaded = _prepare_keras(config, device)
    model = _compiled(task, config)
    if len(_loaded_keras()) > loaded:
        _prepare_keras(config, device)
        model = _compiled(task, config)
    return model


def _prepare_keras(config: DistributedConfig, device: str) -> int:
    loaded = _loaded_keras()
    for keras in loaded:
        keras.utils.set_random_seed(config.seed)
        set_precision(config, keras, device)
    return len(loaded)


def _loaded_keras() -> list[Any]:
    """Return the Kerases that are in use: `tf.keras`, and Keras 3 where that is another one and was imported."""
    import tensorflow as tf

    keras = sys.modules.get("keras")
    is_older = tf.keras.Model.__module__.startswith("tf_keras")
    return [tf.keras, keras] if is_older and keras is not None else [tf.keras]


def _compiled(task: KerasTask, config: DistributedConfig) -> Any:
    """Build the model, and compile it where its builder has not."""
    model = task.model_fn()
    if not hasattr(model, "train_step") or not hasattr(model, "compile"):
        raise UsageError(
            f"model_fn returned a {type(model).__name__}", hint="It must return a Keras model: tf.keras.Model(...)."
        )
    if getattr(model, "optimizer", None) is None:
        if task.loss is None:
            raise ModelError(
                "model_fn returned a model that is not compiled, and no loss was given",
                hint="Call model.compile(...) in model_fn, or give the trainer loss=..., optimizer=..., metrics=[...].",
            )
        model.compile(optimizer=task.optimizer or _optimizer(model, config), loss=task.loss, metrics=task.metrics)
    return model


def _optimizer(model: Any, config: DistributedConfig) -> Any:
    keras = keras_of(model)
    options: dict[str, Any] = {"learning_rate": config.learning_rate}
    if config.optimizer in ("sgd", "rmsprop"):
        options["momentum"] = config.momentum
    elif config.optimizer in ("adam", "adamw"):
        options["beta_1"] = config.momentum
    if config.weight_decay or config.optimizer == "adamw":
        options["weight_decay"] = config.weight_decay
    names = {"sgd": "SGD", "rmsprop": "RMSprop", "adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}
    return getattr(keras.optimizers, names[config.optimizer])(**options)


def _feed(job: KerasJob, strategy: Any, start: Any) -> Feed:
    config = job.config
    options = {"batch_size": config.batch_size, "seed": config.seed, "start": start}
    task = read_task()
    if task is not None and "ps" in task.cluster:
        feed = served_feed(job.task.train, strategy, **options)
    else:
        feed = training_feed(job.task.train, strategy, drop_last=config.drop_last, **options)
    if feed.steps is None:
        raise UsageError(
            "the training dataset does not know how many batches it has",
            hint="Tell it: dataset.apply(tf.data.experimental.assert_cardinality(number of batches)).",
        )
    return feed


def _started(
    job: KerasJob,
    model: Any,
    strategy: Any,
    feed: Feed,
    run_dir: Path,
    device: str,
    first_step: int,
    resumed: str | None,
) -> RunStarted:
    config = job.config
    task = read_task()
    served = task is not None and "ps" in task.cluster
    replicas = len(task.cluster["worker"]) if task is not None and served else strategy.num_replicas_in_sync
    total = (feed.steps or 0) * (config.epochs or 1)
    return RunStarted(
        name=job.task.name,
        run_dir=str(run_dir),
        world_size=replicas,
        device=device,
        strategy=f"tensorflow {config.resolved_strategy if task is None or served else 'multiworker'}",
        precision=precision_name(config.mixed_precision, device),
        parameters=model.count_params() if model.built else 0,
        batch_size=feed.global_batch // (1 if served else replicas),
        accumulation=1,
        global_batch=feed.global_batch,
        total_steps=min(total, config.max_steps) if config.max_steps else total,
        epochs=config.epochs or 1,
        resumed_from=resumed,
        first_step=first_step,
        tensorboard_dir=tensorboard_dir(config, run_dir),
        log_dir=str(run_dir / "logs"),
    )
