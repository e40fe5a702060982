"""What the fork server imports for all ranks: torch and everything that a first training step imports.

Nothing here may start a thread or touch CUDA: neither survives a fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

# The tail of the list is what a first optimizer step, data loader worker or checkpoint imports by itself.
_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "torch.utils.data",
    "torch.utils.serialization.config",
    "torch.profiler",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "cloudpickle",
    "phalanx.comm",
    "phalanx.launch.rank",
    "phalanx.diagnosis.answer",
    "phalanx.diagnosis.overdue",
    "phalanx.diagnosis.point_to_point",
)
PRELOAD = "PHALANX_PRELOAD"
"""The environment variable with further modules to import, separated by commas: an engine's library."""

_WHERE_PRESENT = ("torch.profiler._cupti_monitor", "torch.distributed.checkpoint._fsspec_filesystem")


def preload() -> None:
    """Import everything on the list; ranks share the memory pages."""
    # Modules do not become garbage: collecting between imports costs a sixth of the time.
    gc.disable()
    for name in _MODULES:
        importlib.import_module(name)
    for name in (*_WHERE_PRESENT, *extra_modules(os.environ)):
        _import_if_possible(name)
    # The collector would write to the objects, and ranks would no longer share their pages.
    gc.freeze()
    gc.enable()


def extra_modules(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that are imported in addition to torch."""
    return tuple(name for name in environ.get(PRELOAD, "").split(",") if name)


def preload_for(target: Mapping[str, Any]) -> None:
    """Import the module of a target in this package before its first rank is forked; users' code only in ranks."""
    module = str(target.get("call", "")).partition(":")[0]
    if module.startswith("phalanx.") and module not in sys.modules:
        _import_if_possible(module)
        gc.freeze()


def _import_if_possible(name: str) -> None:
    """Import to save time later; where a module is missing, a rank that needs it reports that."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"not preloaded: {name}: {error}", file=sys.stderr)


SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps libraries from starting threads at import: OpenBLAS (numpy) its compute threads, and Arrow (TensorFlow, Ray and
MLflow) one that returns memory."""


def set_compute_threads(threads: int) -> None:
    """Give this rank its number of compute threads, in torch and in numpy's BLAS."""
    import torch

    torch.set_num_threads(threads)
    if threads > 1 and "numpy" in sys.modules and "OPENBLAS_NUM_THREADS" not in os.environ:
        _set_openblas_threads(threads)


def _set_openblas_threads(threads: int) -> None:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line.rsplit("/", 1)[-1]}
    for path in paths:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            setter = getattr(library, name, None)
            if setter is not None:
                setter(ctypes.c_int(threads))
                break
