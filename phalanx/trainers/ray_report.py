"""What a rank on a worker of Ray Train tells Ray: metrics after every epoch, and where each checkpoint lies."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from phalanx.launch.ray_worker import UNDER_RAY
from phalanx.loop.hooks import Callback


class ReportToRay(Callback):
    """Every rank reports, for Ray waits until all have. Checkpoints stay where they were written: nothing is copied."""

    def on_epoch_end(self, trainer: Any, epoch: int, metrics: dict[str, float]) -> None:
        """Report the metrics of the epoch."""
        import ray.train

        ray.train.report({"epoch": epoch + 1, "step": trainer.step, **metrics})

    def on_checkpoint(self, trainer: Any, path: str) -> None:
        """Let Ray know of a checkpoint; one rank names it for all."""
        if trainer.formation.is_main:
            _report_checkpoint(Path(path).absolute(), trainer.step)
        else:
            _report(trainer.step)


def _report_checkpoint(path: Path, step: int) -> None:
    """Name the checkpoint itself where Ray may look, that is in the run's folder; else name a note of where it is."""
    import ray.train

    storage: Any = ray.train.get_context().get_storage()
    if path.is_relative_to(storage.experiment_fs_path):
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        _report(step, checkpoint=ray.train.Checkpoint.from_directory(path), checkpoint_upload_mode=mode)
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pointer_ckpt.json").write_text(json.dumps({"uri": str(path)}))
        _report(step, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _report(step: int, **more: Any) -> None:
    import ray.train

    ray.train.report({"step": step}, **more)


def engine_callbacks() -> list[Callback]:
    """Return what the engine that started this rank wants to hear."""
    return [ReportToRay()] if os.environ.get(UNDER_RAY) else []
