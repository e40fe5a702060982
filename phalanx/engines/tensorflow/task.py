"""A Keras task, a run of it, and the result of its training; without TensorFlow and torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
class KerasRun:
    """A task with its settings, and the folder of the run; None: one is made."""

    task: KerasTask
    config: DistributedConfig
    run_dir: Path | None = None


@dataclass
class KerasResult:
    """What the leading rank returns: history and weights in Keras' order."""

    history: History
    weights: list[Any]
