"""Report a run to MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, first_line
from phalanx.observe.events import Event, MetricsReported, RanksReported, RunEnded, RunStarted, StepDone
from phalanx.observe.sinks import read_tracking, write_tracking

_START_PARAMS = ("world_size", "strategy", "precision", "global_batch", "parameters", "device")
_OPENED = "MLFLOW_RUN_ID"
"""The run that another process opened and will end: the one that started the ranks, or the user's."""
_DEFAULT_URI = "sqlite:///mlflow.db"
_ALSO = {"perf/samples_per_second": "throughput", "perf/speedup": "speedup"}
"""Metrics that have a second, shorter name in MLflow."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
"""What the name of a metric may not have: a user may log `acc@1`."""
_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}


class MlflowSink:
    """Logs parameters, metrics and the files of a run; joins the active MLflow run, or starts one and ends it.

    Goes to MLFLOW_TRACKING_URI or what `mlflow.set_tracking_uri` was given, and otherwise to mlflow.db in the current
    directory.
    """

    def __init__(
        self,
        experiment: str = "phalanx",
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        run_dir: Path | None = None,
        *,
        resumes: bool = False,
    ) -> None:
        """`resumes`: continue the MLflow run that an earlier run in the same `run_dir` reported to."""
        self._mlflow = import_mlflow()
        self._status = "KILLED"
        self._run_dir = run_dir
        active = self._mlflow.active_run()
        opened = os.environ.get(_OPENED) if active is None else active.info.run_id
        self._is_ours = opened is None
        if active is None and not self._mlflow.is_tracking_uri_set():
            self._mlflow.set_tracking_uri(_DEFAULT_URI)
        before = read_tracking(run_dir, "mlflow") if resumes else None
        self.run_id: str = opened or self._start(run_name, experiment, before)
        write_tracking(run_dir, "mlflow", self.run_id)
        if params:
            self._log_params({name: value for name, value in params.items() if value is not None})
            self._mlflow.log_dict(dict(params), "config.json", run_id=self.run_id)
        self._log_file("config.toml")

    def handle(self, event: Event) -> None:
        """Log the event's values; metrics go out in the background."""
        if isinstance(event, RunStarted):
            params = {name: getattr(event, name) for name in _START_PARAMS}
            if self._is_ours and event.device == "cuda":
                params["num_gpus"] = event.world_size
            self._log_params(params)
            self._mlflow.MlflowClient().set_tag(self.run_id, "phalanx.run_dir", event.run_dir)
        elif isinstance(event, (StepDone, MetricsReported, RanksReported)):
            self._log(event.step, {_NOT_IN_NAMES.sub("_", name): value for name, value in event.scalars().items()})
        elif isinstance(event, RunEnded):
            self._status = _STATUS.get(event.status, "KILLED")
            ends = {f"best/{name}": value for name, value in event.best.items()}
            self._log(event.step, ends | ({} if event.speedup is None else {"speedup": event.speedup}))
            if event.checkpoint is not None:
                self._mlflow.MlflowClient().set_tag(self.run_id, "phalanx.checkpoint", event.checkpoint)

    def close(self) -> None:
        """Wait for metrics under way; end the run if it was started here."""
        self._mlflow.flush_async_logging()
        self._log_file("events.jsonl")
        if self._is_ours:
            self._mlflow.end_run(self._status)

    def _start(self, run_name: str | None, experiment: str, before: str | None) -> str:
        """Start or continue a run and return its id; refuse a tracking server that does not answer before training."""
        try:
            if before is not None and self._exists(before):
                return str(self._mlflow.start_run(run_id=before).info.run_id)
            # Not mlflow.set_experiment: that would redirect what the user's own process logs after this run.
            existing = self._mlflow.get_experiment_by_name(experiment)
            number = str(existing.experiment_id if existing else self._mlflow.create_experiment(experiment))
            run = self._mlflow.start_run(run_name=run_name, experiment_id=number)
            return str(run.info.run_id)
        except self._mlflow.exceptions.MlflowException as error:
            uri = self._mlflow.get_tracking_uri()
            raise UsageError(
                f"MLflow at {uri} took no run: {first_line(error)[:300]}",
                hint="Set MLFLOW_TRACKING_URI to a server that answers, or unset it for mlflow.db in this folder.",
            ) from error

    def _exists(self, run_id: str) -> bool:
        """Whether the server, which may be another one than before, has this run."""
        try:
            return bool(self._mlflow.get_run(run_id).info.lifecycle_stage == "active")
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _log_file(self, name: str) -> None:
        if self._run_dir is not None and (self._run_dir / name).is_file():
            self._mlflow.MlflowClient().log_artifact(self.run_id, str(self._run_dir / name))

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if values:
            also = {_ALSO[name]: value for name, value in values.items() if name in _ALSO}
            self._mlflow.log_metrics({**values, **also}, step=step, run_id=self.run_id, synchronous=False)

    def _log_params(self, params: Mapping[str, Any]) -> None:
        # A joined or resumed run refuses to change a parameter, so those it has stay as they are.
        logged = self._mlflow.get_run(self.run_id).data.params
        fresh = {name: str(value)[:500] for name, value in params.items() if name not in logged}
        if fresh:
            listed = [self._mlflow.entities.Param(name, value) for name, value in fresh.items()]
            self._mlflow.MlflowClient().log_batch(self.run_id, params=listed)


def import_mlflow() -> Any:
    """Import MLflow; UsageError where it is not installed."""
    try:
        import mlflow
    except ImportError as error:
        hint = "Run: pip install 'phalanx[mlflow]'"
        raise UsageError("mlflow needs MLflow, which is not installed", hint=hint) from error
    return mlflow
