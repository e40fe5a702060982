"""Send a job from a script or a notebook to N ranks as a pickle, and return its result.

Classes and functions of `__main__` are pickled by value, so scripts need no main guard, and a notebook works too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from phalanx.config import DistributedConfig
from phalanx.host.files import scratch_folder
from phalanx.launch import CallTarget
from phalanx.runs.record import log_folder
from phalanx.runs.result import read_result
from phalanx.runs.spec import launch_spec
from phalanx.runs.start import run_on_ranks, write_payload
from phalanx.world.layout import JobLayout


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
