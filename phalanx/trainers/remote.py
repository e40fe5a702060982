"""From a plain script, a notebook or a prompt to N ranks and back: the job travels as a pickle, the result returns.

Classes and functions defined in `__main__` travel by value, so no script needs a main guard and a prompt works too.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any, Protocol

import torch

from phalanx.errors import CheckpointError, DataError, ModelError, UsageError
from phalanx.host.files import replacing
from phalanx.launch import CallTarget, launch
from phalanx.launch.scratch import close_scratch, open_scratch
from phalanx.trainers.job import JobResult
from phalanx.trainers.launching import launch_spec, raise_failure
from phalanx.trainers.nvme import warn_of_slow_start
from phalanx.trainers.terminal import open_console

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from phalanx.config import DistributedConfig
    from phalanx.world.layout import Layout

RESULT_NAME = "result.pt"
WEIGHTS_NAME = "weights.pt"
_HEAVY = ("weights", "optimizer_state")
"""What of a result lies in a file of its own, which may be too large to come back from another machine."""


class RemoteJob(Protocol):
    """What can be sent to ranks: its settings, the run's folder, and what a rank does."""

    config: DistributedConfig
    run_dir: Path | None

    def run(self) -> Any:
        """Run it on a rank; what the first rank of this machine returns is the result."""


def run_on_ranks(job: RemoteJob, layout: Layout, data: Mapping[str, Any] | None = None) -> Any:
    """Start the ranks, let them run the job, and return the result of this machine's first rank.

    `data`: data sets that whoever starts the ranks deals out to them, by name.
    """
    folder = open_scratch("job")
    log_dir = open_scratch("logs") if job.run_dir is None else job.run_dir / "logs"
    keep_logs = True
    try:
        payload = folder / "job.pkl"
        write_payload(job, payload)
        with open_console(job.config) as console:
            target = CallTarget("phalanx.worker:run_job_file", str(payload))
            spec = launch_spec(job.config, layout, target, log_dir, env=_tracking_environment())
            spec = dataclasses.replace(spec, data=data or {})
            warn_of_slow_start(job.config, console)
            result = launch(spec, console)
        raise_failure(result, log_dir)
        keep_logs = False
        return read_result(folder)
    except (UsageError, DataError, ModelError, CheckpointError):  # told in full; other reports name the logs
        keep_logs = False
        raise
    finally:
        if job.run_dir is None:
            close_scratch(log_dir, keep=keep_logs)
        close_scratch(folder)


def _tracking_environment() -> Mapping[str, str]:
    """Let the ranks join the MLflow run that is active here."""
    mlflow: Any = sys.modules.get("mlflow")
    active = mlflow.active_run() if mlflow is not None else None
    if active is None:
        return {}
    return {"MLFLOW_RUN_ID": active.info.run_id, "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()}


def write_payload(job: object, path: Path) -> None:
    """Write what the ranks are to do where they read it."""
    import cloudpickle  # only a process that starts ranks needs it

    try:
        with path.open("wb") as file:
            cloudpickle.dump(job, file)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"the job cannot be sent to the ranks: {error}",
            hint="Everything handed to the trainer must be picklable: open files, locks, sockets, running DataLoader "
            "iterators and CUDA handles are not. Or run the script itself on the ranks: phalanx train --script ...",
        ) from error


def write_result(result: object, folder: Path) -> None:
    """Store the main rank's result where the parent waits for it."""
    if isinstance(result, JobResult) and result.weights is not None:
        _write({name: getattr(result, name) for name in _HEAVY}, folder / WEIGHTS_NAME)
        result = dataclasses.replace(result, weights={}, optimizer_state=None)
    _write(result, folder / RESULT_NAME)


def _write(content: object, path: Path) -> None:
    with replacing(path) as file:
        torch.save(content, file)


def read_result(folder: Path) -> Any:
    """Read the result; it was written by ranks that this process started from its own pickle."""
    if not (folder / RESULT_NAME).exists():
        raise UsageError(
            "the ranks have ended well, but their result did not come back from the machine that holds it",
            hint="Run on less data at a time, or write what you need from the ranks: phalanx train --script ...",
        )
    result = _read(folder / RESULT_NAME)
    if not isinstance(result, JobResult) or result.weights is None:
        return result
    if (folder / WEIGHTS_NAME).exists():
        return dataclasses.replace(result, **_read(folder / WEIGHTS_NAME))
    print(
        "phalanx: the trained weights did not come back: the model here is as it was before. Load them from a "
        "checkpoint, trainer.load(checkpoint_dir), or train by phalanx train --script and save them there.",
        file=sys.stderr,
        flush=True,
    )
    return dataclasses.replace(result, weights=None)


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)
