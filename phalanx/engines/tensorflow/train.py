"""Train a Keras model in a rank: choose between Keras' fit and the own loop, and run it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from phalanx.config import DistributedConfig
from phalanx.config.settings import precision_name
from phalanx.engines.tensorflow import backup, callbacks
from phalanx.engines.tensorflow.callbacks import KerasReport
from phalanx.engines.tensorflow.cluster import open_store
from phalanx.engines.tensorflow.feeds import Feed, served_feed, training_feed, validation_feed
from phalanx.engines.tensorflow.loop import OwnLoop, device_kind, make_strategy, set_precision
from phalanx.engines.tensorflow.task import KerasResult, KerasRun, KerasTask
from phalanx.engines.tensorflow.tf_config import read_task
from phalanx.errors import ModelError, UsageError, a_type
from phalanx.host.files import make_private
from phalanx.loop.recorders import open_sinks, save_config, tensorboard_dir
from phalanx.observe.events import RunStarted
from phalanx.observe.run_folder import make_run_dir
from phalanx.observe.sinks import EventStream
from phalanx.run.conductor import outcome_of
from phalanx.world.env import read_rank_env


@dataclass(frozen=True)
class Fitting:
    """How a model is trained: by Keras' fit, or by the `own` loop of this package."""

    model: Any
    strategy: Any
    keras: Any
    own_loop: bool
    note: str

    def run(
        self,
        run: KerasRun,
        feed: Feed,
        val: Any,
        directory: Path | None,
        first_epoch: int,
        report: KerasReport,
        *,
        leads: bool,
    ) -> None:
        """Train from `first_epoch` to the end."""
        config = run.config
        epochs = config.epochs or 1
        keras_callbacks = [
            *run.task.callbacks,
            *self._after_epochs(config, directory, first_epoch, report, leads=leads),
        ]
        if self.own_loop:
            loop = OwnLoop(self.keras, self.model, self.strategy, feed, val, report, keras_callbacks)
            loop.run(first_epoch, epochs, config.max_steps)
            return
        self.model.fit(
            feed.data,
            epochs=epochs,
            steps_per_epoch=feed.steps,
            validation_data=val,
            callbacks=[callbacks.report_callback(self.keras, report, config.max_steps), *keras_callbacks],
            shuffle=False,  # the feed has its own order
            verbose=0,
        )

    def _after_epochs(
        self, config: DistributedConfig, directory: Path | None, done: int, report: KerasReport, *, leads: bool
    ) -> list[Any]:
        """Return the callbacks that follow the user's: the trial control of a search, then the backup."""
        control = callbacks.open_control(open_store(read_task()), leads=leads, done=done)
        following = [] if control is None else [callbacks.control_callback(self.keras, control, report)]
        if directory is not None:
            every = (config.checkpoint_every or (1, ""))[0]
            own_backup = backup.OwnBackup(self.model, directory, leads=leads) if self.own_loop else None
            following.append(callbacks.backup_callback(self.keras, directory, every, report, own_backup))
            if control is not None:
                following.append(callbacks.rate_keeper(self.keras, self.model, directory, leads=leads))
        return following


def choose(model: Any, strategy: Any) -> Fitting:
    """Return the way of training that works for this model under this strategy."""
    keras = keras_of(model)
    name = "Keras 2 (tf_keras)" if keras.__name__ == "tf_keras" else "Keras 3"
    own_loop, note = True, f"a {name} model by its own fit"
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        note = f"a {name} model by phalanx' own loop: Keras' fit cannot report steps that workers take by themselves"
    elif name == "Keras 3" and isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        note = "a Keras 3 model by phalanx' own loop: Keras 3's fit does not run on several workers"
    else:
        own_loop = False
    return Fitting(model, strategy, keras, own_loop, note)


def keras_of(model: Any) -> Any:
    """Return the Keras that a model was made with."""
    names = [base.__module__.partition(".")[0] for base in type(model).__mro__]
    return importlib.import_module("tf_keras" if "tf_keras" in names else "keras")


def train(run: KerasRun) -> tuple[Any, KerasResult]:
    """Train on this rank; return the model and the result for the caller."""
    config = run.config
    env = read_rank_env()
    task = read_task()
    leads = task is None or task.leads
    run_dir = run.run_dir or make_run_dir(config, run.task.name)
    strategy = make_strategy(config)
    device = device_kind(config)
    with strategy.scope():
        model = _built(run.task, config, device)
    directory = backup.backup_dir(config, run_dir, 0 if env is None else env.attempt)
    if directory is not None:
        make_private(directory.parent)
    first_epoch = backup.first_epoch(directory)
    feed = _feed(run, strategy, first_epoch)
    first_step = first_epoch * (feed.steps or 0)
    started = _started(run, model, strategy, feed, run_dir, device, first_step, str(directory) if first_epoch else None)
    if leads:
        save_config(config, run_dir)
    events = EventStream(open_sinks(config, run_dir) if leads else [])
    report = KerasReport(config, events, started, feed.steps or 0)
    fitting = choose(model, strategy)
    try:
        report.begin()
        report.say(fitting.note)
        if config.unused_note:
            report.say(config.unused_note, "warning")
        val = validation_feed(run.task.val, batch=feed.global_batch or None)
        with callbacks.stopping(report):
            fitting.run(run, feed, val, directory, first_epoch, report, leads=leads)
        report.end()
    except BaseException as error:
        report.end(outcome_of(error))
        raise
    finally:
        events.close()
    return model, KerasResult(report.history, model.get_weights())


def _built(task: KerasTask, config: DistributedConfig, device: str) -> Any:
    """Build and compile the model with the seed and the precision of the run.

    Where `tf.keras` is Keras 2, `model_fn` may import Keras 3: that uses up random numbers and does not have the
    precision yet, so the model is built once more.
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
    """Return the Keras packages in use: `tf.keras`, and Keras 3 where that is another one and was imported."""
    keras = sys.modules.get("keras")
    is_older = tf.keras.Model.__module__.startswith("tf_keras")
    return [tf.keras, keras] if is_older and keras is not None else [tf.keras]


def _compiled(task: KerasTask, config: DistributedConfig) -> Any:
    """Build the model, and compile it where its builder has not."""
    model = task.model_fn()
    if not hasattr(model, "train_step") or not hasattr(model, "compile"):
        raise UsageError(
            f"model_fn returned {a_type(model)}", hint="It must return a Keras model: tf.keras.Model(...)."
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
    options: dict[str, Any] = {"learning_rate": config.learning_rate}
    if config.optimizer in ("sgd", "rmsprop"):
        options["momentum"] = config.momentum
    elif config.optimizer in ("adam", "adamw"):
        options["beta_1"] = config.momentum
    if config.weight_decay or config.optimizer == "adamw":
        options["weight_decay"] = config.weight_decay
    names = {"sgd": "SGD", "rmsprop": "RMSprop", "adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}
    return getattr(keras_of(model).optimizers, names[config.optimizer])(**options)


def _feed(run: KerasRun, strategy: Any, first_epoch: int) -> Feed:
    config = run.config
    options: dict[str, Any] = {"batch_size": config.batch_size, "seed": config.seed, "first_epoch": first_epoch}
    task = read_task()
    if task is not None and "ps" in task.cluster:
        feed = served_feed(run.task.train, strategy, **options)
    else:
        feed = training_feed(run.task.train, strategy, drop_last=config.drop_last, **options)
    if feed.steps is None:
        raise UsageError(
            "the training dataset does not know how many batches it has",
            hint="Write dataset.apply(tf.data.experimental.assert_cardinality(number of batches)).",
        )
    return feed


def _started(
    run: KerasRun,
    model: Any,
    strategy: Any,
    feed: Feed,
    run_dir: Path,
    device: str,
    first_step: int,
    resumed: str | None,
) -> RunStarted:
    config = run.config
    task = read_task()
    served = task is not None and "ps" in task.cluster
    replicas = len(task.cluster["worker"]) if task is not None and served else strategy.num_replicas_in_sync
    total = (feed.steps or 0) * (config.epochs or 1)
    return RunStarted(
        name=run.task.name,
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
