"""`RayTrainer`: a model on Ray's workers, from a script, inside a Tune trial or inside a worker of Ray Train."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.config import FIELDS, DistributedConfig
from phalanx.data.ray_data import RayData, is_ray_dataset
from phalanx.errors import UsageError
from phalanx.trainers.base import TorchTrainer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from phalanx.observe.history import History

_OTHER_NAMES = {"lr": "learning_rate", "num_epochs": "epochs"}
"""What examples of Ray Tune call our settings."""


class RayTrainer(TorchTrainer):
    """Trains on Ray.

    `config` is a DistributedConfig, or a dict as Ray Tune hands it to a trial: names that are settings here are taken
    (`lr` means learning_rate), the others are yours (`hidden_size`), kept in `hyperparameters`, and ignored.
    """

    backend: ClassVar[str] = "ray"

    def __init__(
        self,
        model: nn.Module,
        config: DistributedConfig | Mapping[str, Any] | torch.optim.Optimizer | None = None,
        **settings: Any,
    ) -> None:
        self.hyperparameters: dict[str, Any] = {}
        if isinstance(config, Mapping):
            given, self.hyperparameters = split_hyperparameters(config)
            settings, config = {**given, **settings}, None
        super().__init__(model, config, **settings)

    def fit(self, train: Any, val: Any = None, **settings: Any) -> History:
        """Train on a DataLoader, data set, iterable of batches or Ray data set; settings given here win."""
        batch_size = settings.get("batch_size", self.config.batch_size)
        return super().fit(_dealt(train, "train", batch_size), _dealt(val, "val", batch_size), **settings)

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the mean loss and metrics over every sample of `data`."""
        return super().evaluate(_dealt(data, "val", self.config.batch_size))

    def predict(self, data: Any) -> Any:
        """Return the model's outputs for `data`, in its order (on a started rank: on the main rank only)."""
        return super().predict(_dealt(data, "val", self.config.batch_size))


def split_hyperparameters(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a trial's hyperparameters into our settings and the user's own, and say once which are not ours."""
    renamed = {_OTHER_NAMES.get(name, name): value for name, value in given.items()}
    if len(renamed) < len(given):
        twice = [f"'{name}' and '{meant}'" for name, meant in _OTHER_NAMES.items() if name in given and meant in given]
        raise UsageError(f"{', '.join(twice)} name the same setting.", hint="Give one of them.")
    ours = {name: value for name, value in renamed.items() if name in FIELDS}
    others = {name: value for name, value in renamed.items() if name not in FIELDS}
    if others:
        names = ", ".join(others)
        print(f"phalanx: no setting of the trainer, left to your code: {names}", file=sys.stderr)
    return ours, others


def _dealt(data: Any, name: str, batch_size: int | None) -> Any:
    return RayData(data, name, batch_size) if is_ray_dataset(data) else data
