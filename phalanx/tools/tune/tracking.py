"""A search in MLflow: one run for the search, with a child run per trial, to which the trial itself reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.observe.mlflow import import_mlflow
from phalanx.tools.tune.objective import Objective
from phalanx.tools.tune.results import Results
from phalanx.tools.tune.trial import State, Trial

_RUN_FILE = "mlflow-run"
"""Holds the id of the run of the search or of a trial, in its folder."""
_LONGEST = 500
_STATUS = {State.FINISHED: "FINISHED", State.STOPPED: "FINISHED", State.FAILED: "FAILED"}


class Tracking:
    """No tracking."""

    def environment(self, trial: Trial) -> dict[str, str]:
        """Return the environment variables that a trial needs."""
        return {}

    def close_trial(self, trial: Trial) -> None:
        """Do nothing."""

    def close(self, results: Results | None) -> None:
        """Do nothing."""


class MlflowTracking(Tracking):
    """The search's run and its children; their ids are in their folders so that a resumed search continues them."""

    def __init__(self, config: DistributedConfig, name: str, objective: Objective, folder: Path) -> None:
        mlflow = import_mlflow()
        self.uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{Path.cwd()}/mlflow.db"
        self._client = mlflow.MlflowClient(tracking_uri=self.uri)
        self._objective = objective
        name_of = config.mlflow if isinstance(config.mlflow, str) else "phalanx"
        known = self._client.get_experiment_by_name(name_of)
        self._experiment = str(known.experiment_id if known else self._client.create_experiment(name_of))
        file = folder / _RUN_FILE
        if not file.exists():
            file.write_text(self._make(config.name or f"tune-{name}", {}), encoding="utf-8")
        self._parent = file.read_text(encoding="utf-8")

    def _make(self, name: str, tags: dict[str, str]) -> str:
        run = self._client.create_run(self._experiment, tags={"mlflow.runName": name, **tags})
        return str(run.info.run_id)

    def environment(self, trial: Trial) -> dict[str, str]:
        """Return the variables with which a trial reports to its own run, which its first start creates."""
        file = trial.folder / _RUN_FILE
        if not file.exists():
            run = self._make(f"trial-{trial.number}", {"mlflow.parentRunId": self._parent})
            self._log_params(run, trial.params)
            file.write_text(run, encoding="utf-8")
        return {"MLFLOW_RUN_ID": file.read_text(encoding="utf-8"), "MLFLOW_TRACKING_URI": self.uri}

    def close_trial(self, trial: Trial) -> None:
        """End a trial's run, with its curve where the trainer has not reported it already."""
        run = self.environment(trial)["MLFLOW_RUN_ID"]
        if self._objective.metric not in self._client.get_run(run).data.metrics:
            for iteration, value in trial.curve(self._objective):
                self._client.log_metric(run, self._objective.metric, value, step=iteration)
        self._client.set_tag(run, "phalanx.state", str(trial.state))
        if trial.cause:
            self._client.set_tag(run, "phalanx.cause", trial.cause)
        self._client.set_terminated(run, _STATUS.get(trial.state, "KILLED"))

    def close(self, results: Results | None) -> None:
        """End the search's run with the best point and the charts."""
        if results is None:
            self._client.set_terminated(self._parent, "KILLED")
            return
        self._log_params(self._parent, {f"best/{name}": value for name, value in results.best_params.items()})
        self._client.log_metric(self._parent, f"best/{results.objective.metric}", results.best_value)
        for file in sorted(results.folder.iterdir()):
            if file.suffix in (".html", ".png", ".toml"):
                self._client.log_artifact(self._parent, str(file))
        self._client.set_terminated(self._parent, "FINISHED")

    def _log_params(self, run: str, params: Mapping[str, Any]) -> None:
        for name, value in params.items():
            self._client.log_param(run, name, str(value)[:_LONGEST])


def open_tracking(config: DistributedConfig, name: str, objective: Objective, folder: Path) -> Tracking:
    """Return the tracking that the settings of the trials ask for."""
    return MlflowTracking(config, name, objective, folder) if config.mlflow else Tracking()
