"""`TensorFlowDistributedTrainer`: a Keras model on replicas, worker processes or parameter servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from phalanx.config import DistributedConfig, resolve
from phalanx.config.option import check_folder
from phalanx.engines.tensorflow.cluster import quiet_environment
from phalanx.engines.tensorflow.data import check_data
from phalanx.engines.tensorflow.job import KerasJob
from phalanx.engines.tensorflow.task import KerasResult, KerasRun, KerasTask
from phalanx.engines.tensorflow.tf_config import check_against, read_task, watch_peers
from phalanx.errors import UsageError
from phalanx.host.gpus import count_gpus
from phalanx.observe.history import History
from phalanx.observe.run_folder import make_run_dir
from phalanx.run.conductor import RecordedRun, recorded_run
from phalanx.run.preflight import check_before_start
from phalanx.run.record import RunRecord
from phalanx.world.env import read_rank_env
from phalanx.world.mesh import plan_layout

if TYPE_CHECKING:
    from phalanx.config.arguments import AllSettings, TrainerSettings


class TensorFlowDistributedTrainer:
    """Trains the Keras model that `model_fn` builds.

    It trains in one process with a replica per device (`strategy="mirrored"`), in a process per worker
    (`"multiworker"`), or in workers with parameter servers (`"parameter-server"`).

    `model_fn` returns a compiled Keras model; it is called in the strategy's scope, on every worker. Every setting of
    `DistributedConfig` that Keras can follow is an argument. After `fit`, `model` has the trained weights.
    """

    backend = "tensorflow"

    def __init__(
        self,
        model_fn: Callable[[], Any] | None = None,
        config: DistributedConfig | None = None,
        *,
        model: Any = None,
        loss: Any = None,
        optimizer: Any = None,
        metrics: list[Any] | None = None,
        callbacks: list[Any] | None = None,
        **arguments: Unpack[TrainerSettings],
    ) -> None:
        settings: dict[str, Any] = dict(arguments)
        function = model_fn if model is None else model
        if model is not None or not callable(model_fn) or hasattr(model_fn, "train_step"):
            raise UsageError(
                f"{type(self).__name__} takes a function that returns a Keras model; got {type(function).__name__}",
                hint="Variables belong to the strategy in whose scope they are made, so every worker builds the model: "
                "write model_fn=build, where build() makes and compiles it.",
            )
        if isinstance(optimizer, str) and optimizer in ("adamw", "adam", "sgd", "rmsprop", "adagrad"):
            settings["optimizer"], optimizer = optimizer, None
        self._settings_given = frozenset(settings)
        self.config = self._configure(config, settings)
        self.callbacks = list(callbacks or [])
        self.history: History | None = None
        self._parts = {"loss": loss, "optimizer": optimizer, "metrics": metrics}
        self._model_fn = model_fn
        self._model: Any = None
        self._weights: list[Any] | None = None

    def _configure(self, config: DistributedConfig | None, settings: dict[str, Any]) -> DistributedConfig:
        if config is None:
            resolved = resolve({"backend": self.backend, **settings})
            self._settings_given = resolved.given
            return resolved.config
        chosen = config.replace(**{"backend": self.backend, **settings})
        chosen.refuse_unused(settings)
        return chosen

    @property
    def model(self) -> Any:
        """The model; after `fit` with the trained weights."""
        if self._model is None:
            os.environ.update(quiet_environment(os.environ))
            self._model = self._model_fn()
        if self._weights is not None:
            self._model.set_weights(self._weights)
            self._weights = None
        return self._model

    @property
    def weights(self) -> list[Any]:
        """The weights in Keras' order; after `fit` on other processes this needs no model in this one."""
        return self._weights if self._weights is not None else list(self.model.get_weights())

    @property
    def best_accuracy(self) -> float | None:
        """The best validation accuracy of the last fit."""
        return self.history.best_accuracy if self.history else None

    def fit(self, train: Any, val: Any = None, **settings: Unpack[AllSettings]) -> History:
        """Train on arrays (inputs, targets), a tf.data.Dataset of global batches, or a function that returns one."""
        config = self.config.replace(**settings) if settings else self.config
        config.refuse_unused(settings)
        check_data(train, "train")
        if val is not None:
            check_data(val, "val")
        name = config.name or getattr(self._model_fn, "__name__", "keras").strip("<>")
        task = KerasTask(self._model_fn, train, val, callbacks=self.callbacks, name=name, **self._parts)
        result = self._run(task, config, self._settings_given | settings.keys())
        self.history = result.history
        return result.history

    def _run(self, task: KerasTask, config: DistributedConfig, settings: Collection[str]) -> KerasResult:
        """Run here in a process of a cluster and where one process is enough; else start the processes."""
        env = read_rank_env()
        if env is None or env.local_rank == 0:  # once per node
            check_before_start(config)
        member = read_task()
        result: KerasResult
        if member is not None:
            check_against(member, config, settings)
        if member is not None and env is None:
            watch_peers(member, config.start_timeout)
        layout = None if env is not None or member is not None else plan_layout(config, count_gpus())
        if layout is None or layout.world_size == 1:
            os.environ.update(quiet_environment(os.environ))
            from phalanx.engines.tensorflow.train import train

            if "PHALANX_RUN_DIR" in os.environ or not (member is None or member.leads):
                self._model, result = train(KerasRun(task, config))  # another process keeps the run's record
                return result
            with self._recorded(task, config, in_place=True) as run:
                self._model, result = train(KerasRun(task, config, run.folder))
            return result
        from phalanx.run.start import send_job

        with self._recorded(task, config, in_place=False) as run:
            result = send_job(KerasJob(task, config.with_trusted(device=layout.device), run.folder), layout)
        self._weights = result.weights
        return result

    def _recorded(
        self, task: KerasTask, config: DistributedConfig, *, in_place: bool
    ) -> AbstractContextManager[RecordedRun]:
        record = RunRecord.of_this_process(config.given())
        return recorded_run(make_run_dir(config, task.name), config, record, in_place=in_place)

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the loss and metrics over `data`, in this process."""
        check_data(data, "data")
        model = self.model  # TensorFlow reads its variables when it is imported, which is in here
        from phalanx.engines.tensorflow.feeds import validation_feed

        metrics = model.evaluate(validation_feed(data, batch=self.config.batch_size), return_dict=True, verbose=0)
        return {name: float(value) for name, value in metrics.items()}

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs, in this process."""
        return self.model.predict(inputs, verbose=0)

    def save(self, path: str | Path) -> Path:
        """Write the model's weights (.weights.h5), or the whole model (.keras); only the leading task writes."""
        path = Path(path)
        member = read_task()
        if member is None or member.leads:
            check_folder(f"save('{path}')", path)
            (self.model.save if path.suffix == ".keras" else self.model.save_weights)(str(path))
        return path

    def load(self, path: str | Path) -> None:
        """Read weights that `save` wrote."""
        if not Path(path).exists():
            raise UsageError(f"there are no weights at {path}")
        self.model.load_weights(str(path))
