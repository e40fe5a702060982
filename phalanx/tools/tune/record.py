"""The record of a search: Optuna's storage, a SQLite file that Optuna's tools read too."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.tools.tune.domains import import_optuna
from phalanx.tools.tune.objective import Objective
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.trial import State, Trial

FILE = "study.db"
_STUDY = "phalanx"


class Record:
    """Holds every trial from its start, so that an interrupted search can be resumed."""

    def __init__(self, folder: Path, space: SearchSpace, objective: Objective, settings: dict[str, Any]) -> None:
        """`settings`: must be the same when the search is resumed."""
        self._optuna = import_optuna("tuning")
        self._folder, self._space, self._objective = folder, space, objective
        path = folder / FILE
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
        asked = self._study.ask({name: domain.distribution() for name, domain in domains.items()})
        self._ids[asked.number] = asked._trial_id
        return Trial(asked.number, params, self._folder_of(asked.number))

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

    def draw(self) -> list[Path]:
        """Draw hyperparameters and learning curves as PNG files, by Optuna, and return their paths."""
        try:
            import matplotlib
        except ImportError as error:
            raise UsageError(
                "the PNG pictures need matplotlib, which is not installed", hint="Run: pip install 'phalanx[tune]'"
            ) from error
        matplotlib.use("agg", force=False)
        from matplotlib import pyplot

        plots = self._optuna.visualization.matplotlib
        paths = []
        for name, plot in (("parallel", plots.plot_parallel_coordinate), ("curves", plots.plot_intermediate_values)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Optuna calls these functions experimental
                figure = plot(self._study).figure
                paths.append(self._folder / f"{name}.png")
                figure.savefig(paths[-1], dpi=130, bbox_inches="tight")
            pyplot.close(figure)
        return paths

    def close(self) -> None:
        """Close the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()
