"""Send a job from a script or a notebook to N ranks as a pickle, and return its result.

Classes and functions of `__main__` are pickled by value, so scripts need no main guard, and a notebook works too.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.host.files import replacing
from phalanx.launch import CallTarget
from phalanx.launch.scratch import scratch_folder
from phalanx.observe.history import History
from phalanx.runs.folder import log_folder
from phalanx.runs.spec import launch_spec
from phalanx.runs.start import run_on_ranks, write_payload
from phalanx.trainers.job import JobResult
from phalanx.world.layout import JobLayout

RESULT_NAME = "result.pt"
WEIGHTS_NAME = "weights.pt"
_HEAVY = ("weights", "optimizer_state")
"""Parts of a result in a separate file, which may be too large to come back from another machine."""


class RemoteJob(Protocol):
    """What can be sent to ranks: settings, the run's folder, and what a rank does."""

    config: DistributedConfig
    run_dir: Path | None

    def run(self) -> Any:
        """Run it on a rank; the result is that of the first rank on this machine."""


def send_job(job: RemoteJob, layout: JobLayout, data: Mapping[str, Any] | None = None) -> Any:
    """Start the ranks, let them run the job, and return the result of the first rank on this machine.

    `data`: data sets that the launcher distributes to the ranks, by name.
    """
    with scratch_folder("job") as folder, log_folder(job.run_dir) as logs:
        write_payload(job, folder / "job.pkl")
        target = CallTarget("phalanx.worker:run_job_file", str(folder / "job.pkl"))
        spec = launch_spec(job.config, layout, target, logs, env=_tracking_environment(), data=data)
        run_on_ranks(spec, job.config, waiting=layout.starting)
        may_have_none = spec.starter is None and spec.elastic is not None and spec.num_nodes > 1
        return read_result(folder, may_have_none=may_have_none)


def _tracking_environment() -> Mapping[str, str]:
    """Let the ranks join the MLflow run that is active here."""
    mlflow: Any = sys.modules.get("mlflow")
    active = mlflow.active_run() if mlflow is not None else None
    if active is None:
        return {}
    return {"MLFLOW_RUN_ID": active.info.run_id, "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()}


def write_result(result: object, folder: Path) -> None:
    """Write the result of the main rank where the parent reads it."""
    if isinstance(result, JobResult) and result.weights is not None:
        _write({name: getattr(result, name) for name in _HEAVY}, folder / WEIGHTS_NAME)
        result = dataclasses.replace(result, weights={}, optimizer_state=None)
    _write(result, folder / RESULT_NAME)


def _write(content: object, path: Path) -> None:
    with replacing(path) as file:
        torch.save(content, file)


def read_result(folder: Path, *, may_have_none: bool = False) -> Any:
    """Read the result; it was written by ranks that this process started from its own pickle.

    `may_have_none`: whether all ranks of this machine may have been scaled away before the end of the run.
    """
    if may_have_none and not (folder / RESULT_NAME).exists():
        reason = "the run has finished on other machines, and this one had no rank left"
        _say_untrained(reason)
        return JobResult(history=History(status="finished", reason=reason))
    if not (folder / RESULT_NAME).exists():
        raise UsageError(
            "the ranks have ended well, but their result did not come back from the machine that holds it",
            hint="Run on less data at a time, or write what you need from the ranks: phalanx train --script ...",
        )
    result = torch.load(folder / RESULT_NAME, map_location="cpu", weights_only=False)
    if not isinstance(result, JobResult) or result.weights is None:
        return result
    if (folder / WEIGHTS_NAME).exists():
        heavy = torch.load(folder / WEIGHTS_NAME, map_location="cpu", weights_only=False)
        return dataclasses.replace(result, **heavy)
    _say_untrained("the trained weights did not come back")
    return dataclasses.replace(result, weights=None)


def _say_untrained(why: str) -> None:
    print(
        f"phalanx: {why}: the model here is as it was before. Load the weights from a checkpoint, "
        "trainer.load(checkpoint_dir), or train by phalanx train --script and save them there.",
        file=sys.stderr,
        flush=True,
    )
