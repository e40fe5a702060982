"""The engine `ray`: what Ray changes about a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.config.option import options_of
from phalanx.engine import Engine
from phalanx.engines.ray.declaration import RaySettings
from phalanx.engines.ray.rules import UNDER_RAY
from phalanx.launch.spec import PlannedRanks, Starter


class Ray(Engine):
    """Ranks on Ray's workers, local or on a cluster."""

    def uses_gpus_here(self, config: DistributedConfig) -> bool:
        """Whether Ray runs on this machine, not on a cluster elsewhere."""
        return options_of(RaySettings, config).address is None

    def counts_gpus_here(self, config: DistributedConfig) -> bool:
        """Return False: Ray itself waits for the requested GPUs."""
        return False

    def starter(self, config: DistributedConfig, ranks: PlannedRanks) -> Starter:
        """Return Ray Train with the config's settings."""
        from phalanx.engines.ray.launch import starter

        return starter(config, ranks)

    def datasets(self, *sources: Any) -> Mapping[str, Any]:
        """Return the Ray data sets among the data of a task."""
        from phalanx.engines.ray.trainer import datasets_of

        return datasets_of(*sources)

    def callbacks(self) -> list[Any]:
        """Return the callback that reports epochs and checkpoints to Ray Train."""
        if not os.environ.get(UNDER_RAY):
            return []
        from phalanx.engines.ray.trainer import ReportToRay

        return [ReportToRay()]

    def executor(self, trainable: Any, request: Any, notice: Callable[[str], None]) -> Any:
        """Return the executor that runs trials on Ray's workers."""
        from phalanx.engines.ray.tune import open_executor

        return open_executor(trainable, request, notice)


ENGINE = Ray()
