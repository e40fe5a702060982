"""`RayTrainer`, Ray data sets as batches of tensors, and the callback that reports to Ray Train."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.config.aliases import NAMES
from phalanx.errors import DataError, UsageError
from phalanx.loop.hooks import Callback
from phalanx.observe.history import History
from phalanx.run.trainer import TorchTrainer
from phalanx.world.env import read_rank_env

if TYPE_CHECKING:
    from phalanx.config.arguments import AllSettings, TorchArguments
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.loop.train_loop import TrainLoop

_OTHER_NAMES = {"lr": "learning_rate", "num_epochs": "epochs"}
"""Names that examples of Ray Tune use for settings."""
_TARGETS = ("y", "label", "labels", "target", "targets")
"""Names of a second column that make a batch (inputs, targets)."""


class RayTrainer(TorchTrainer):
    """Trains on Ray.

    `config` is a DistributedConfig, or a dict as Ray Tune passes it to a trial: names of settings are used (`lr` means
    learning_rate), others (`hidden_size`) are kept in `hyperparameters` and otherwise ignored.
    """

    backend: ClassVar[str] = "ray"

    def __init__(
        self,
        model: nn.Module = None,  # type: ignore[assignment]
        config: DistributedConfig | Mapping[str, Any] | torch.optim.Optimizer | None = None,
        **settings: Unpack[TorchArguments],
    ) -> None:
        self.hyperparameters: dict[str, Any] = {}
        values: dict[str, Any] = dict(settings)
        if isinstance(config, Mapping):
            of_trial, self.hyperparameters = split_hyperparameters(config)
            values, config = {**of_trial, **values}, None
        super().__init__(model, config, **values)

    def fit(self, train: Any, val: Any = None, **settings: Unpack[AllSettings]) -> History:
        """Train on a DataLoader, data set, iterable of batches or Ray data set; settings given here win."""
        batch_size = settings.get("batch_size", self.config.batch_size)
        return super().fit(_as_ray_data(train, "train", batch_size), _as_ray_data(val, "val", batch_size), **settings)

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the mean loss and metrics over every sample of `data`."""
        return super().evaluate(_as_ray_data(data, "val", self.config.batch_size))

    def predict(self, data: Any) -> Any:
        """Return the model's outputs for `data`, in its order (on a started rank: on the main rank only)."""
        return super().predict(_as_ray_data(data, "val", self.config.batch_size))


def split_hyperparameters(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a trial's hyperparameters into settings and the user's own, and print which are not settings."""
    renamed = {_OTHER_NAMES.get(name, name): value for name, value in parameters.items()}
    if len(renamed) < len(parameters):
        twice = [
            f"'{name}' and '{meant}'"
            for name, meant in _OTHER_NAMES.items()
            if name in parameters and meant in parameters
        ]
        raise UsageError(f"{', '.join(twice)} name the same setting.", hint="Give one of them.")
    ours = {name: value for name, value in renamed.items() if name in NAMES}
    others = {name: value for name, value in renamed.items() if name not in NAMES}
    if others:
        names = ", ".join(others)
        print(f"phalanx: not a setting of the trainer, left to your code: {names}", file=sys.stderr)
    return ours, others


def _as_ray_data(data: Any, name: str, batch_size: int | None) -> Any:
    return RayData(data, name, batch_size) if is_ray_dataset(data) else data


# --- Ray Data -------------------------------------------------------------------------------------------------------


def is_ray_dataset(data: Any) -> bool:
    """Whether this is a data set of Ray Data; Ray is not imported to find out."""
    module: Any = sys.modules.get("ray.data")
    return module is not None and isinstance(data, module.Dataset)


def datasets_of(*sources: Any) -> dict[str, Any]:
    """Return the Ray data sets among what a task reads, by the names under which the ranks will find them."""
    return {source.name: source.dataset for source in sources if isinstance(source, RayData)}


class RayData:
    """A Ray data set in the trainer's process, and in a rank the shard of it that Ray assigns to the rank.

    Batches are dicts of tensors by column; two columns of which the second is called y, label(s) or target(s) become
    (inputs, targets).
    """

    def __init__(self, dataset: Any, name: str, batch_size: int | None) -> None:
        if batch_size is None:
            raise UsageError("a Ray data set has no batch size.", hint="Set batch_size: samples per rank and step.")
        if dataset is not None:
            dataset.context.enable_progress_bars = False  # the run shows its own progress
        self.dataset = dataset
        self.name = name
        self.batch_size = batch_size

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray brings the data to the ranks itself: there, `name` is enough to find them.
        return (_ShardedByRay if self.name == "train" else RayData), (None, self.name, self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._source().iter_torch_batches(batch_size=self.batch_size, device="cpu"):
            names = list(batch)
            yield (batch[names[0]], batch[names[1]]) if len(names) == 2 and names[1] in _TARGETS else batch

    def _source(self) -> Any:
        if self.dataset is not None:
            return self.dataset
        import ray.train

        shard: Any = ray.train.get_dataset_shard(self.name)
        if shard is None:
            raise DataError(f"Ray did not bring the data set '{self.name}' to this rank.")
        return shard


class _ShardedByRay(RayData):
    """The training shard of a rank: with `shard`, the loader does not pick every n-th batch itself."""

    def shard(self, num_shards: int, index: int) -> _ShardedByRay:
        """Return this rank's part; Ray shards by rank, so every rank must see other samples."""
        env = read_rank_env()
        if env is not None and (num_shards != env.world_size or index != env.rank):
            raise UsageError(
                f"Ray Data shards samples over {env.world_size} ranks, but this layout has {num_shards} parts.",
                hint="Use a torch data set with tensor, pipeline or context parallelism.",
            )
        return self


# --- reports to Ray Train -------------------------------------------------------------------------------------------


class ReportToRay(Callback):
    """Every rank reports, for Ray waits until all have. Checkpoints stay where they were written: nothing is copied."""

    def on_epoch_end(self, trainer: RunningTrainer, epoch: int, metrics: dict[str, float]) -> None:
        """Report the metrics of the epoch."""
        import ray.train

        ray.train.report({"epoch": epoch + 1, "step": trainer.step, **metrics})

    def on_checkpoint(self, trainer: RunningTrainer, path: str) -> None:
        """Report a checkpoint to Ray; one rank names it for all."""
        step = cast("TrainLoop", trainer).saving.last_step  # the loop's has gone on while the checkpoint was written
        assert step is not None, "this checkpoint was just written"
        if trainer.formation.is_main:
            _report_checkpoint(Path(path).absolute(), step)
        else:
            _report(step)


def _report_checkpoint(path: Path, step: int) -> None:
    """Report the checkpoint itself where it is in the run's folder, as Ray requires; else a file with its path."""
    import ray.train

    storage: Any = ray.train.get_context().get_storage()
    if path.is_relative_to(storage.experiment_fs_path):
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        _report(step, checkpoint=ray.train.Checkpoint.from_directory(path), checkpoint_upload_mode=mode)
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pointer_ckpt.json").write_text(json.dumps({"uri": str(path)}))
        _report(step, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _report(step: int, **more: Any) -> None:
    import ray.train

    ray.train.report({"step": step}, **more)
