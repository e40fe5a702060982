"""The record of a search: Optuna's storage, a SQLite file that Optuna's tools read too; its runs in MLflow."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.run.stored import STUDY_FILE
from phalanx.tools.tune.domains import import_optuna
from phalanx.tools.tune.results import Results
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.trial import Objective, State, Trial
from phalanx.trackers import load_mlflow

_STUDY = "phalanx"


class Record:
    """Holds every trial from its start, so that an interrupted search can be resumed."""

    def __init__(self, folder: Path, space: SearchSpace, objective: Objective, settings: dict[str, Any]) -> None:
        """`settings`: must be the same when the search is resumed."""
        self._optuna = import_optuna("tuning")
        self._folder, self._space, self._objective = folder, space, objective
        path = folder / STUDY_FILE
        existed = path.exists()
        self._storage = self._optuna.storages.RDBStorage(f"sqlite:///{path}")
        if existed and objective.is_open:  # the metric may have been settled before the interruption
            before = self._optuna.load_study(study_name=_STUDY, storage=self._storage).user_attrs
            objective.metric, objective.mode = json.loads(before["metric"]), json.loads(before["mode"])
            settings = {**settings, "metric": objective.metric, "mode": objective.mode}
        self._study = self._open_study()
        plain = {name: json.dumps(value, default=repr, sort_keys=True) for name, value in settings.items()}
        self._check_same(plain)
        for _ in self._study.get_trials(deepcopy=False, states=[self._optuna.trial.TrialState.WAITING]):
            self._study.ask()  # opened when the interruption came: it becomes a running trial like the others
        self._ids = {frozen.number: frozen._trial_id for frozen in self._study.get_trials(deepcopy=False)}
        if not existed:
            for name, text in plain.items():
                self._study.set_user_attr(name, text)

    def _open_study(self) -> Any:
        return self._optuna.create_study(
            storage=self._storage,
            study_name=_STUDY,
            direction="maximize" if self._objective.mode == "max" else "minimize",
            load_if_exists=True,
            sampler=self._optuna.samplers.RandomSampler(seed=0),
        )

    def rewrite(self, trials: Sequence[Trial], *, ending: Trial) -> None:
        """Write the trials so far into a new study: the objective has changed, and a study's direction cannot.

        `ending`: the trial that ends now; the caller closes it.
        """
        attrs = self._study.user_attrs
        self._optuna.delete_study(study_name=_STUDY, storage=self._storage)
        self._study = self._open_study()
        for name, value in attrs.items():
            self._study.set_user_attr(name, value)
        for name, value in (("metric", self._objective.metric), ("mode", self._objective.mode)):
            self._study.set_user_attr(name, json.dumps(value))
        for trial in trials:
            self.open_trial(trial.params)
            if trial.state.is_final and trial is not ending:
                self.close_trial(trial)

    def _check_same(self, settings: dict[str, str]) -> None:
        before = self._study.user_attrs
        changed = [name for name, text in settings.items() if name in before and before[name] != text]
        if changed:
            lines = "\n  ".join(f"{name}: {before[name]} then, {settings[name]} now" for name in changed)
            raise UsageError(
                f"the search in {self._folder} was begun differently:\n  {lines}",
                hint="Resume it with the same settings, or begin another one in a new folder (--study-dir).",
            )

    def trials(self) -> list[Trial]:
        """Return the recorded trials; the events of a trial that had not ended are read from its folder."""
        return [self._read(frozen) for frozen in self._study.get_trials(deepcopy=False)]

    def _read(self, frozen: Any) -> Trial:
        attrs = frozen.user_attrs
        params = json.loads(attrs["params"])
        for name, domain in self._space.domains.items():
            if name in params:
                params[name] = domain.restored(params[name])
        trial = Trial(frozen.number, params, self._folder_of(frozen.number))
        trial.lineage = json.loads(attrs.get("lineage", "[]"))
        trial.stopped_at = attrs.get("stopped_at")
        trial.seconds = attrs.get("seconds", 0.0)
        trial.cause = attrs.get("cause", "")
        trial.read_events()
        trial.state = State(attrs["state"]) if "state" in attrs else State.PAUSED
        return trial

    def _folder_of(self, number: int) -> Path:
        return self._folder / "trials" / f"{number:04d}"

    def open_trial(self, params: dict[str, Any]) -> Trial:
        """Add a trial and return it."""
        domains = {name: self._space.domains[name] for name in params if name in self._space.domains}
        values = {name: domain.stored(params[name]) for name, domain in domains.items()}
        # Enqueued with its point: an interruption must not leave a trial without one.
        self._study.enqueue_trial(values, user_attrs={"params": json.dumps({**params, **values}, default=repr)})
        optuna_trial = self._study.ask({name: domain.distribution() for name, domain in domains.items()})
        self._ids[optuna_trial.number] = optuna_trial._trial_id
        return Trial(optuna_trial.number, params, self._folder_of(optuna_trial.number))

    def update(self, trial: Trial) -> None:
        """Record a running trial's point, lineage and verdict."""
        handle = self._handle(trial)
        domains = self._space.domains
        values = {n: domains[n].stored(v) if n in domains else v for n, v in trial.params.items()}
        handle.set_user_attr("params", json.dumps(values, default=repr))
        handle.set_user_attr("lineage", json.dumps(trial.lineage, default=repr))
        if trial.stopped_at is not None:
            handle.set_user_attr("stopped_at", trial.stopped_at)

    def close_trial(self, trial: Trial) -> None:
        """Record how a trial ended."""
        self.update(trial)
        handle = self._handle(trial)
        for iteration, value in trial.curve(self._objective):
            handle.report(value, iteration)
        handle.set_user_attr("cause", trial.cause)
        handle.set_user_attr("seconds", trial.seconds)
        handle.set_user_attr("state", str(trial.state))
        states, final = self._optuna.trial.TrialState, trial.value(self._objective)
        if trial.state is State.FAILED or final is None or not math.isfinite(final):
            self._study.tell(trial.number, state=states.FAIL)
        elif trial.state is State.STOPPED:
            self._study.tell(trial.number, state=states.PRUNED)  # with its last report as its value
        else:
            self._study.tell(trial.number, final)

    def _handle(self, trial: Trial) -> Any:
        return self._optuna.trial.Trial(self._study, self._ids[trial.number])

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the whole search."""
        self._study.set_user_attr(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the whole search."""
        return self._study.user_attrs.get(name, default)

    def close(self) -> None:
        """Close the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()


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
        mlflow = load_mlflow()
        self.uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{Path.cwd()}/mlflow.db"
        self._client = mlflow.MlflowClient(tracking_uri=self.uri)
        self._objective = objective
        name_of = config.mlflow if isinstance(config.mlflow, str) else "phalanx"
        existing = self._client.get_experiment_by_name(name_of)
        self._experiment = str(existing.experiment_id if existing else self._client.create_experiment(name_of))
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
            if file.suffix in (".html", ".toml"):
                self._client.log_artifact(self._parent, str(file))
        self._client.set_terminated(self._parent, "FINISHED")

    def _log_params(self, run: str, params: Mapping[str, Any]) -> None:
        for name, value in params.items():
            self._client.log_param(run, name, str(value)[:_LONGEST])


def open_tracking(config: DistributedConfig, name: str, objective: Objective, folder: Path) -> Tracking:
    """Return the tracking that the settings of the trials ask for."""
    return MlflowTracking(config, name, objective, folder) if config.mlflow else Tracking()
