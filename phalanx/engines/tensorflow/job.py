"""What every rank of a Keras run executes, as it is sent to the ranks; without TensorFlow and torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phalanx.engines.tensorflow.task import KerasResult, KerasRun


@dataclass
class KerasJob(KerasRun):
    """A run that each rank executes its part of."""

    sends_back: ClassVar[bool] = True

    def run(self) -> KerasResult:
        """Train on this rank."""
        from phalanx.engines.tensorflow.train import train  # not in the parent: it imports torch

        _, result = train(self)
        return result
