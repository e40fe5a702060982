"""A Keras task with its settings, as it is sent to the ranks; without TensorFlow and torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from phalanx.config import DistributedConfig
from phalanx.engines.tensorflow.task import KerasResult, KerasTask


@dataclass
class KerasJob:
    """A task with its settings: what every rank runs."""

    task: KerasTask
    config: DistributedConfig
    run_dir: Path | None = None
    sends_back: ClassVar[bool] = True

    def run(self) -> KerasResult:
        """Train on this rank."""
        from phalanx.engines.tensorflow.train import train  # not in the parent: it imports torch

        _, result = train(self)
        return result
