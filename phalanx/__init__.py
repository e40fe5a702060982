"""Phalanx: one trainer, every parallelism, from a laptop to a cluster.

Names are imported when first used, so that `import phalanx` and `phalanx --help` never pay for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.version import __version__

if TYPE_CHECKING:
    from phalanx.config import DistributedConfig
    from phalanx.errors import PhalanxError
    from phalanx.loop.formation import Formation
    from phalanx.loop.hooks import Callback, StepInfo
    from phalanx.models.lora import lora, merge_lora, remove_lora, unmerge_lora
    from phalanx.models.lora_files import load_adapter, save_adapter
    from phalanx.observe.history import History
    from phalanx.trainers.ddp import PyTorchDDPTrainer
    from phalanx.trainers.horovod import HorovodTrainer
    from phalanx.trainers.ray import RayTrainer
    from phalanx.trainers.tensorflow.face import TensorFlowDistributedTrainer
    from phalanx.trainers.verify.face import verify
    from phalanx.tune.tuner import DistributedTuner

_HOMES = {
    "Callback": "phalanx.loop.hooks",
    "DistributedConfig": "phalanx.config",
    "DistributedTuner": "phalanx.tune.tuner",
    "Formation": "phalanx.loop.formation",
    "History": "phalanx.observe.history",
    "HorovodTrainer": "phalanx.trainers.horovod",
    "PhalanxError": "phalanx.errors",
    "PyTorchDDPTrainer": "phalanx.trainers.ddp",
    "RayTrainer": "phalanx.trainers.ray",
    "StepInfo": "phalanx.loop.hooks",
    "TensorFlowDistributedTrainer": "phalanx.trainers.tensorflow.face",
    "load_adapter": "phalanx.models.lora_files",
    "lora": "phalanx.models.lora",
    "merge_lora": "phalanx.models.lora",
    "remove_lora": "phalanx.models.lora",
    "save_adapter": "phalanx.models.lora_files",
    "unmerge_lora": "phalanx.models.lora",
    "verify": "phalanx.trainers.verify.face",
}

__all__ = [
    "Callback",
    "DistributedConfig",
    "DistributedTuner",
    "Formation",
    "History",
    "HorovodTrainer",
    "PhalanxError",
    "PyTorchDDPTrainer",
    "RayTrainer",
    "StepInfo",
    "TensorFlowDistributedTrainer",
    "__version__",
    "load_adapter",
    "lora",
    "merge_lora",
    "remove_lora",
    "save_adapter",
    "unmerge_lora",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'phalanx' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
