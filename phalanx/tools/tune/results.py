"""The results of a search: the best trial, all others, and their files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.renamed import NAMES
from phalanx.config.sources import toml_value
from phalanx.errors import SearchFailedError
from phalanx.tools.tune.objective import Objective
from phalanx.tools.tune.table import ranked
from phalanx.tools.tune.trainable import Trainable
from phalanx.tools.tune.trial import State, Trial

BEST_FILE = "best.toml"
TRIALS_FILE = "trials.json"


@dataclass(frozen=True)
class Results:
    """All trials of a search, and the best of them."""

    trials: tuple[Trial, ...]
    objective: Objective
    folder: Path

    @property
    def best(self) -> Trial:
        """The trial with the best metric at its end."""
        return ranked(self.trials, self.objective)[0]

    @property
    def best_params(self) -> dict[str, Any]:
        """Its hyperparameters."""
        return dict(self.best.params)

    @property
    def best_value(self) -> float:
        """Its metric."""
        value = self.best.value(self.objective)
        assert value is not None, "a trial without the metric is not the best"
        return value

    @property
    def failed(self) -> list[Trial]:
        """The trials that failed; `cause` says why."""
        return [trial for trial in self.trials if trial.state is State.FAILED]

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with one row per trial."""
        import pandas as pd

        return pd.DataFrame([{**trial.to_dict(), **trial.params, **trial.last} for trial in self.trials])


def check_some_worked(trials: Sequence[Trial]) -> None:
    """Raise with the common cause when every trial failed."""
    if any(trial.state in (State.FINISHED, State.STOPPED) for trial in trials):
        return
    causes = Counter(trial.cause or "unknown cause" for trial in trials).most_common()
    cause, count = causes[0]
    share = "all" if count == len(trials) else f"{count} of {len(trials)}"
    others = f" (and {len(causes) - 1} other causes)" if len(causes) > 1 else ""
    raise SearchFailedError(
        f"all {len(trials)} trials failed; {share} of them: {cause}{others}",
        hint=f"The first one's logs: {trials[0].folder / 'logs'}",
    )


def write_trials(results: Results) -> Path:
    """Write every trial as JSON, for programs."""
    path = results.folder / TRIALS_FILE
    path.write_text(json.dumps([trial.to_dict() for trial in results.trials], indent=2, default=repr) + "\n")
    return path


def write_best(results: Results, subject: Trainable) -> Path:
    """Write the best trial's values: a recipe's as a recipe that `phalanx train` takes, others for --config."""
    best = results.best
    lines = [
        f"# The best of {len(results.trials)} trials: trial {best.number}, "
        f"{results.objective.metric} = {results.best_value:.6g} after {best.iteration} iterations."
    ]
    document = subject.document(best.params)
    tables = {name: values for name, values in document.items() if isinstance(values, dict)}
    lines += [f"{name} = {toml_value(value)}" for name, value in document.items() if name not in tables]
    for name, values in tables.items():
        if values:
            lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in values.items())]
    if not tables:
        own = {name: value for name, value in best.params.items() if name not in NAMES}
        lines += [
            f"# {name} = {json.dumps(value, default=repr)}  (an argument of the program)" for name, value in own.items()
        ]
    path = results.folder / BEST_FILE
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
