"""What is tuned: a recipe, a script or module, or a function. A trial is a launch like that of `phalanx train`."""

from __future__ import annotations

import dataclasses
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.config import FIELDS, DistributedConfig, ResolvedConfig, read_settings
from phalanx.config.aliases import NAMES
from phalanx.config.checking import unknown_field
from phalanx.errors import UsageError, a_type, unknown_name
from phalanx.launch import CallTarget, ModuleTarget, ScriptTarget
from phalanx.launch.spec import Target
from phalanx.observe.events import MetricsReported
from phalanx.observe.sinks import JsonlSink
from phalanx.recipes import Recipe, load_recipe
from phalanx.run.record import RunRecord
from phalanx.run.spec import given_settings, recipe_target, settings_environment
from phalanx.tools.tune.trial import REPORTED, Trial, as_number
from phalanx.world.env import read_rank_env

_REPORTED_BY_RECIPES = ("train/loss", "val/loss", "val/accuracy")
OF_THE_TRIAL = ("run_dir", "checkpoint_dir", "resume_from_checkpoint", "node_rank", "rdzv_endpoint")
"""Settings that are different for each trial."""


class TrainableParts(NamedTuple):
    """What the launcher needs for one trial."""

    config: DistributedConfig
    target: Target
    env: dict[str, str]


@dataclass(frozen=True)
class Trainable(ABC):
    """What is tuned, with the settings of all trials."""

    resolved: ResolvedConfig

    @property
    @abstractmethod
    def name(self) -> str:
        """The name for users."""

    @abstractmethod
    def check(self, names: Iterable[str]) -> None:
        """Raise for hyperparameters that would have no effect."""

    @abstractmethod
    def parts(self, trial: Trial) -> TrainableParts:
        """Return what to launch for a trial."""

    def overruled(self, trial: Trial) -> dict[str, Any]:
        """Return the hyperparameters that had no effect on a trial, with the values that it had instead."""
        return {}

    def command(self, best: str, others: Mapping[str, Any]) -> list[str] | None:
        """Return the command that trains with a file of values; `others`: values that are not settings."""
        return None

    def document(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file that holds a point of the space: its settings."""
        return {name: value for name, value in params.items() if name in NAMES}

    def check_metric(self, metric: str | None) -> None:  # noqa: B027 - scripts and functions report what they like
        """Raise for a metric that no trial will report, where that is known."""


def trial_config(resolved: ResolvedConfig, trial: Trial, params: Mapping[str, Any]) -> DistributedConfig:
    """Return the settings of a trial: those of all, its own point, its own folders."""
    of_trial: dict[str, Any] = {
        "run_dir": str(trial.folder),
        "checkpoint_dir": str(trial.checkpoints),
        "resume_from_checkpoint": True,
        "progress": False,
        "name": f"{resolved.config.name or 'trial'}-{trial.number}",
    }
    if resolved.origins["keep_last"] == "default" and resolved.config.framework == "torch":  # Keras keeps one
        of_trial["keep_last"] = 1
    settings = {name: value for name, value in params.items() if name in NAMES}
    return resolved.config.replace(**settings, **of_trial)


def _changed(resolved: ResolvedConfig, config: DistributedConfig) -> dict[str, Any]:
    """Return the settings that were given for all trials, and those that this one has for itself."""
    differs = {name for name in FIELDS if getattr(config, name) != getattr(resolved.config, name)}
    return given_settings(resolved, config) | {name: getattr(config, name) for name in differs}


@dataclass(frozen=True)
class RecipeTrainable(Trainable):
    """A recipe: hyperparameters are settings, or values of its model and data such as `model.width`."""

    recipe: Recipe

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.recipe.name

    def check(self, names: Iterable[str]) -> None:
        """A recipe takes settings, and options of its model and data."""
        unknown = [name for name in names if name not in NAMES and not name.startswith(("model.", "data."))]
        if unknown:
            hint = "A recipe takes settings (`phalanx config show`), and model.<option> or data.<option>."
            raise UsageError("\n  ".join(map(unknown_field, unknown)), hint=hint)

    def check_metric(self, metric: str | None) -> None:
        """Raise for a metric that recipes do not report; `accuracy` means val/accuracy."""
        if self.recipe.callbacks:
            return  # they may log it
        names = {*_REPORTED_BY_RECIPES, *(f"val/{name}" for name in self.recipe.metrics)}
        if metric is not None and not {metric, f"val/{metric}"} & names:
            raise UsageError(unknown_name("metric", metric, names, of=f"the recipe '{self.name}'"))

    def parts(self, trial: Trial) -> TrainableParts:
        """Return what to launch for a trial."""
        config = trial_config(self.resolved, trial, trial.params)
        recipe = self.recipe.with_values({n: v for n, v in trial.params.items() if n not in NAMES})
        settings = {n: v for n, v in _changed(self.resolved, config).items() if n not in OF_THE_TRIAL}
        trial.folder.mkdir(parents=True, exist_ok=True)
        RunRecord.of_this_process(settings, recipe=dataclasses.asdict(recipe)).write(trial.folder)
        return TrainableParts(config, recipe_target(recipe, config, trial.folder, trial.folder), {})

    def command(self, best: str, others: Mapping[str, Any]) -> list[str] | None:
        """Return the command that trains the file, which names the recipe."""
        return ["phalanx", "train", best]

    def document(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return a recipe with these values: the name of the one that was tuned, and what differs from it."""
        changed = self.recipe.with_values({n: v for n, v in params.items() if n not in NAMES})
        base = load_recipe(self.recipe.source) if self.recipe.source else None
        content: dict[str, Any] = {} if base is None else {"recipe": self.recipe.source}
        content["settings"] = {n: v for n, v in params.items() if n in NAMES}
        for table in ("model", "data"):
            unchanged = {} if base is None else getattr(base, table)
            content[table] = {
                n: v for n, v in getattr(changed, table).items() if n not in unchanged or unchanged[n] != v
            }
        return content


@dataclass(frozen=True)
class ScriptTrainable(Trainable):
    """A script or module: settings go to the trainer inside it, other names are its own arguments."""

    target: ScriptTarget | ModuleTarget

    @property
    def name(self) -> str:
        """The file's name without its ending, or the module's."""
        return Path(self.target.path).stem if isinstance(self.target, ScriptTarget) else self.target.name

    def check(self, names: Iterable[str]) -> None:
        """Check the target only: any name may be an argument of the script."""
        self.target.check()

    def parts(self, trial: Trial) -> TrainableParts:
        """Return what to launch for a trial."""
        config = trial_config(self.resolved, trial, trial.params)
        of_script = [f"--{name}={value}" for name, value in trial.params.items() if name not in NAMES]
        arguments = (*self.target.args, *of_script)
        target = dataclasses.replace(self.target, args=arguments)
        return TrainableParts(config, target, settings_environment(_changed(self.resolved, config)))

    def overruled(self, trial: Trial) -> dict[str, Any]:
        """Compare with the run's record: a trainer's arguments in the script win over settings from outside."""
        path = trial.folder / "config.toml"
        ran = read_settings(path) if path.exists() else {}
        settings = {name: value for name, value in trial.params.items() if name in FIELDS}
        return {name: ran.get(name) for name, value in settings.items() if ran and ran.get(name) != value}

    def command(self, best: str, others: Mapping[str, Any]) -> list[str] | None:
        """Return the command that runs the script with the file's settings and its other values as arguments."""
        named = (
            ["--script", str(self.target.path)] if isinstance(self.target, ScriptTarget) else ["-m", self.target.name]
        )
        arguments = [*self.target.args, *(f"--{name}={value}" for name, value in others.items())]
        return ["phalanx", "train", *named, "--config", best, *(["--", *arguments] if arguments else [])]


@dataclass(frozen=True)
class FunctionTrainable(Trainable):
    """A function of the hyperparameters: it gets all of them as a dict, and returns metrics."""

    function: Callable[[dict[str, Any]], Any]
    metric: str

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.function, "__name__", type(self.function).__name__)).strip("<>")

    def check(self, names: Iterable[str]) -> None:
        """A function takes any hyperparameter."""
        if not callable(self.function):
            raise UsageError(f"train_fn = {self.function!r}: expected a function of the hyperparameters")

    def parts(self, trial: Trial) -> TrainableParts:
        """Return what to launch for a trial."""

        config = trial_config(self.resolved, trial, {})
        payload = trial.folder / "train_fn.pkl"
        import cloudpickle

        try:  # functions of scripts and notebooks are pickled by value
            payload.write_bytes(cloudpickle.dumps((self.function, trial.params, self.metric)))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise UsageError(
                f"train_fn cannot be sent to the trials: {error}",
                hint="Open files, locks and data loaders inside the function, not outside of it.",
            ) from error
        env = settings_environment(_changed(self.resolved, config))
        return TrainableParts(config, CallTarget("phalanx.tools.tune.trainable:run_file", str(payload)), env)


def run_file(payload: str) -> None:
    """Call the function in a rank of a trial, and report what it returns."""
    function, params, metric = pickle.loads(Path(payload).read_bytes())
    returned = function(params)
    env = read_rank_env()
    if returned is None or (env is not None and env.rank != 0):
        return
    values = _as_metrics(returned, metric)
    events = JsonlSink(Path(os.environ["PHALANX_RUN_DIR"]) / "events.jsonl")
    events.handle(MetricsReported(0, 0, REPORTED, values, ends_epoch=True, rank=0))
    events.close()


def _as_metrics(returned: Any, metric: str) -> dict[str, float]:
    if isinstance(returned, Mapping):
        if isinstance(returned.get(metric), str):
            raise UsageError(f"train_fn returned {metric} = {returned[metric]!r}, which is text, not a number")
        numbers = {str(name): value for name, value in returned.items() if not isinstance(value, str)}
        return {name: as_number(name, value) for name, value in numbers.items()}
    try:
        return {metric: float(returned)}
    except (TypeError, ValueError):
        raise UsageError(
            f"train_fn returned {a_type(returned)}",
            hint="Return a dict of metrics, such as {'loss': 0.3}, or the metric itself as a number.",
        ) from None
