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
    from phalanx.loop.hooks import Callback
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.loop.script import log
    from phalanx.loop.step_info import StepInfo
    from phalanx.observe.history import History
    from phalanx.run.trainer import PyTorchDDPTrainer, Trainer
    from phalanx.tools import plan, tune
    from phalanx.tools.profile.timers import PerformanceMonitor
    from phalanx.tools.tune.tuner import DistributedTuner
    from phalanx.tools.verify.proofs import verify
    from phalanx.zoo.models.lora import lora, merge_lora, remove_lora, unmerge_lora
    from phalanx.zoo.models.lora.peft import load_adapter, save_adapter
    from phalanx.zoo.saved_run import load_run


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
    "RunningTrainer",
    "StepInfo",
    "TensorFlowDistributedTrainer",
    "Trainer",
    "__version__",
    "load_adapter",
    "load_run",
    "log",
    "lora",
    "merge_lora",
    "plan",
    "remove_lora",
    "save_adapter",
    "tune",
    "unmerge_lora",
    "verify",
]

_NAMES = {
    "phalanx.config": "DistributedConfig",
    "phalanx.engines.horovod.trainer": "HorovodTrainer",
    "phalanx.engines.ray.trainer": "RayTrainer",
    "phalanx.engines.tensorflow.trainer": "TensorFlowDistributedTrainer",
    "phalanx.errors": "PhalanxError",
    "phalanx.loop.faults": "FaultPlan",
    "phalanx.loop.formation": "Formation",
    "phalanx.loop.hooks": "Callback",
    "phalanx.loop.running_trainer": "RunningTrainer",
    "phalanx.loop.step_info": "StepInfo",
    "phalanx.loop.script": "log",
    "phalanx.zoo.models.lora": "lora merge_lora remove_lora unmerge_lora",
    "phalanx.zoo.models.lora.peft": "load_adapter save_adapter",
    "phalanx.observe.history": "History",
    "phalanx.tools.plan": "plan",
    "phalanx.tools.profile.timers": "PerformanceMonitor",
    "phalanx.tools.tune": "tune",
    "phalanx.tools.tune.tuner": "DistributedTuner",
    "phalanx.tools.verify.proofs": "verify",
    "phalanx.zoo.saved_run": "load_run",
    "phalanx.run.trainer": "PyTorchDDPTrainer Trainer",
}
__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted(__all__)
