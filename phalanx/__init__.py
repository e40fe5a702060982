"""Phalanx: one trainer, every parallelism, from a laptop to a cluster.

Names are imported when first used, so that `import phalanx` and `phalanx --help` never pay for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names
from phalanx.version import __version__

if TYPE_CHECKING:
    from phalanx.config import DistributedConfig
    from phalanx.engines.horovod.trainer import HorovodTrainer
    from phalanx.engines.ray.trainer import RayTrainer
    from phalanx.engines.tensorflow.trainer import TensorFlowDistributedTrainer
    from phalanx.errors import PhalanxError
    from phalanx.loop.faults import FaultPlan
    from phalanx.loop.formation import Formation
    from phalanx.loop.hooks import Callback, StepInfo
    from phalanx.models.lora import lora, merge_lora, remove_lora, unmerge_lora
    from phalanx.models.lora.files import load_adapter, save_adapter
    from phalanx.observe.history import History
    from phalanx.observe.performance import PerformanceMonitor
    from phalanx.tools import plan, tune
    from phalanx.tools.tune.tuner import DistributedTuner
    from phalanx.tools.verify.proofs import verify
    from phalanx.trainers.saved_run import load_run
    from phalanx.trainers.torch import PyTorchDDPTrainer

_HOMES = {
    "Callback": "phalanx.loop.hooks",
    "DistributedConfig": "phalanx.config",
    "DistributedTuner": "phalanx.tools.tune.tuner",
    "FaultPlan": "phalanx.loop.faults",
    "Formation": "phalanx.loop.formation",
    "History": "phalanx.observe.history",
    "HorovodTrainer": "phalanx.engines.horovod.trainer",
    "PerformanceMonitor": "phalanx.observe.performance",
    "PhalanxError": "phalanx.errors",
    "PyTorchDDPTrainer": "phalanx.trainers.torch",
    "RayTrainer": "phalanx.engines.ray.trainer",
    "StepInfo": "phalanx.loop.hooks",
    "TensorFlowDistributedTrainer": "phalanx.engines.tensorflow.trainer",
    "load_adapter": "phalanx.models.lora.files",
    "load_run": "phalanx.trainers.saved_run",
    "lora": "phalanx.models.lora",
    "merge_lora": "phalanx.models.lora",
    "plan": "phalanx.tools.plan",
    "remove_lora": "phalanx.models.lora",
    "save_adapter": "phalanx.models.lora.files",
    "tune": "phalanx.tools.tune",
    "unmerge_lora": "phalanx.models.lora",
    "verify": "phalanx.tools.verify.proofs",
}

__all__ = [
    "Callback",
    "DistributedConfig",
    "DistributedTuner",
    "FaultPlan",
    "Formation",
    "History",
    "HorovodTrainer",
    "PerformanceMonitor",
    "PhalanxError",
    "PyTorchDDPTrainer",
    "RayTrainer",
    "StepInfo",
    "TensorFlowDistributedTrainer",
    "__version__",
    "load_adapter",
    "load_run",
    "lora",
    "merge_lora",
    "plan",
    "remove_lora",
    "save_adapter",
    "tune",
    "unmerge_lora",
    "verify",
]

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
