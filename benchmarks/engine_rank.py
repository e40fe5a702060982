"""One rank of one engine, started by that engine's own launcher: python engine_rank.py ENGINE MODEL STEPS FOLDER."""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
_RANK = ("RANK", "HOROVOD_RANK")
_SIZE = ("WORLD_SIZE", "HOROVOD_SIZE")
_LOOPS = {
    "raw": "contestants.raw:run",
    "pytorch-ddp": "contestants.phalanx_trainer:run",
    "ray": "contestants.phalanx_trainer:run",
    "deepspeed": "contestants.phalanx_trainer:run_deepspeed",
    "horovod-raw": "contestants.horovod_loop:run",
    "horovod": "contestants.horovod_loop:run_phalanx",
}


def main() -> None:
    """Train, then write the figures and a fingerprint of the weights: ranks that were in step have the same."""
    engine, model, steps, folder = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rank, size = (int(next(os.environ[name] for name in names if name in os.environ)) for names in (_RANK, _SIZE))
    measured = _keras(model, int(steps), size) if engine == "tensorflow" else _torch(engine, model, int(steps), size)
    measured["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (Path(folder) / f"{rank}.json").write_text(json.dumps(measured), encoding="utf-8")


def _torch(engine: str, model: str, steps: int, ranks: int) -> dict[str, Any]:
    from rank import fingerprint
    from workloads import build_task

    task = build_task(model, device="cpu", world_size=ranks, steps=steps or None)
    before = fingerprint(task.model)
    module, _, name = _LOOPS[engine].partition(":")
    getattr(importlib.import_module(module), name)(task)
    clock = task.clock
    return {
        "ms_per_step": clock.ms_per_step,
        "first_at": clock.first_at,
        "before": before,
        "after": fingerprint(task.model),
    }


def _keras(model: str, steps: int, ranks: int) -> dict[str, Any]:
    from contestants import keras_fit
    from workloads import WORKLOADS

    workload = WORKLOADS[model]
    return keras_fit.run(workload.batch_size, workload.warmup, steps or workload.steps, ranks)


if __name__ == "__main__":
    main()
