"""Which loop runs: Keras 3's fit, Keras 2's (tf_keras), or our own where Keras 3's fit fails; chosen by the model."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.trainers.tensorflow import backup, gating, reporting
from phalanx.trainers.tensorflow.own_loop import OwnBackup, OwnLoop
from phalanx.world.tf_cluster import open_store
from phalanx.world.tf_config import read_task

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.config import DistributedConfig
    from phalanx.trainers.tensorflow.feeding import Feed, Start
    from phalanx.trainers.tensorflow.reporting import KerasReport
    from phalanx.trainers.tensorflow.task import KerasJob


@dataclass(frozen=True)
class Fitting:
    """How a model is trained, and the words that tell the user."""

    model: Any
    strategy: Any
    keras: Any
    own: bool
    says: str

    def run(
        self,
        job: KerasJob,
        feed: Feed,
        val: Any,
        directory: Path | None,
        start: Start,
        report: KerasReport,
        *,
        leads: bool,
    ) -> None:
        """Train from `start` to the end."""
        config = job.config
        epochs = config.epochs or 1
        callbacks = [*job.task.callbacks, *self._after_epochs(config, directory, start, report, leads=leads)]
        if self.own:
            loop = OwnLoop(self.keras, self.model, self.strategy, feed, val, report, callbacks)
            loop.run(start.epoch, epochs, config.max_steps)
            return
        self.model.fit(
            feed.data,
            epochs=epochs,
            steps_per_epoch=feed.steps,
            validation_data=val,
            callbacks=[reporting.as_callback(self.keras, report, config.max_steps), *callbacks],
            shuffle=False,  # the feed has its own order
            verbose=0,
        )

    def _after_epochs(
        self, config: DistributedConfig, directory: Path | None, start: Start, report: KerasReport, *, leads: bool
    ) -> list[Any]:
        """Return what of ours follows the user's callbacks: the gate of a search, then the backup."""
        gate = gating.open_gate(open_store(read_task()), leads=leads, done=start.epoch)
        found = [] if gate is None else [gating.as_callback(self.keras, gate, report)]
        if directory is None:
            return found
        every = (config.checkpoint_every or (1, ""))[0]
        if self.own:
            kept = OwnBackup(self.model, directory, leads=leads)
            found.append(_own_backup_callback(self.keras, kept, directory, every, report))
        else:
            found.append(backup.as_callback(self.keras, directory, every, report))
        if gate is not None:
            found.append(gating.rate_keeper(self.keras, self.model, directory, leads=leads))
        return found


def choose(model: Any, strategy: Any) -> Fitting:
    """Return the way of training that works for this model under this strategy."""
    import tensorflow as tf

    keras = keras_of(model)
    name = "Keras 2 (tf_keras)" if keras.__name__ == "tf_keras" else "Keras 3"
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        says = f"a {name} model by phalanx' own loop: Keras' fit cannot tell of steps that workers take by themselves"
        return Fitting(model, strategy, keras, own=True, says=says)
    if name == "Keras 3" and isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        says = "a Keras 3 model by phalanx' own loop: Keras 3's fit does not run on several workers"
        return Fitting(model, strategy, keras, own=True, says=says)
    return Fitting(model, strategy, keras, own=False, says=f"a {name} model by its own fit")


def keras_of(model: Any) -> Any:
    """Return the Keras that a model was made with."""
    names = [base.__module__.partition(".")[0] for base in type(model).__mro__]
    return importlib.import_module("tf_keras" if "tf_keras" in names else "keras")


def _own_backup_callback(keras: Any, kept: OwnBackup, directory: Path, every: int, report: KerasReport) -> Any:
    class Backup(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            kept.restore()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            last = epoch + 1 == self.params["epochs"] or self.model.stop_training
            if not report.epoch_is_whole or ((epoch + 1) % every and not last):
                return
            began = time.monotonic()
            kept.save(epoch)
            report.saved(str(directory), backup.size_of(directory), time.monotonic() - began)

    return Backup()
