"""A Keras task with its settings, as it is sent to the ranks, and its result; without TensorFlow and torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from phalanx.config import DistributedConfig
from phalanx.observe.history import History


@dataclass
class KerasTask:
    """A function that builds the model, the data, and the arguments of `compile` for a model that is not compiled."""

    model_fn: Callable[[], Any]
    train: Any
    val: Any = None
    loss: Any = None
    optimizer: Any = None
    metrics: list[Any] | None = None
    callbacks: list[Any] = field(default_factory=list)
    name: str = "keras"


@dataclass
class KerasResult:
    """What the leading rank returns: history and weights in Keras' order."""

    history: History
    weights: list[Any]


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
