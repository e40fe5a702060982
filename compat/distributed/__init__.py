"""Phalanx under the import name `distributed`. Everything here is Phalanx's own; new code should import `phalanx`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import phalanx

if TYPE_CHECKING:
    from phalanx import (
        DistributedConfig,
        DistributedTuner,
        Formation,
        History,
        HorovodTrainer,
        PerformanceMonitor,
        PhalanxError,
        PyTorchDDPTrainer,
        RayTrainer,
        TensorFlowDistributedTrainer,
    )

__all__ = [
    "DistributedConfig",
    "DistributedTuner",
    "Formation",
    "History",
    "HorovodTrainer",
    "PerformanceMonitor",
    "PhalanxError",
    "PyTorchDDPTrainer",
    "RayTrainer",
    "TensorFlowDistributedTrainer",
]

__version__ = phalanx.__version__


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(phalanx, name)
    raise AttributeError(
        f"module 'distributed' (phalanx-compat) has no attribute '{name}'. "
        "If Dask's distributed was meant: uninstall phalanx-compat, the two share the import name."
    )


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
