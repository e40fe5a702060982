"""What is to be trained, as it crosses to the ranks, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phalanx.config import DistributedConfig
    from phalanx.observe.history import History


@dataclass
class KerasTask:
    """A function that builds the model, the data, and what Keras is to compile where the model is not yet compiled."""

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
    """What the leading rank hands back: weights in Keras' order."""

    history: History
    weights: list[Any]


@dataclass
class KerasJob:
    """A task with its settings: what every rank runs."""

    task: KerasTask
    config: DistributedConfig
    run_dir: Path | None = None

    def run(self) -> KerasResult:
        """Train on this rank."""
        from phalanx.trainers.tensorflow.training import train

        _, result = train(self)
        return result
