"""`load_run`: a past run in Python, with its model, config and history; and how it is evaluated."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.checkpoint.manifest import MANIFEST, read_manifest
from phalanx.config import DistributedConfig, resolve
from phalanx.config.sources import read_settings
from phalanx.data.sets import takes
from phalanx.errors import UsageError
from phalanx.host.remote import as_path
from phalanx.loop.prepare import adapt
from phalanx.models.contract import WrapsModel, implements
from phalanx.observe.guard import say_to_user
from phalanx.observe.history import History
from phalanx.recipes import Recipe
from phalanx.recipes.imports import extend_path, is_import_path
from phalanx.runs.stored import StoredRun, find_run, is_run, list_runs
from phalanx.trainers.pretrained import tokenizer_of, with_tokenizer
from phalanx.trainers.recipe import recipe_augment, recipe_loss, recipe_metrics, recipe_parts
from phalanx.trainers.torch import Trainer
from phalanx.trainers.weights import load_weights

_LARGEST_EXPONENT = 700
_OF_THE_RUN = ("run_dir", "checkpoint_dir", "resume_from_checkpoint", "tensorboard", "name")


class SavedRun(StoredRun):
    """A run on disk. `model` has the weights of the best checkpoint, or of the one that was asked for."""

    _checkpoint: Path | None
    _given: nn.Module | None

    def __init__(self, path: Path, checkpoint: Path | None = None, model: nn.Module | None = None) -> None:
        super().__init__(path)
        self.__dict__.update(_checkpoint=checkpoint, _given=model)

    @cached_property
    def config(self) -> DistributedConfig:
        """All settings, without those about its own folders."""
        path = self.path / "config.toml"
        settings = read_settings(path) if path.is_file() else {}
        return resolve({n: v for n, v in settings.items() if n not in _OF_THE_RUN}, environ={}).config

    @cached_property
    def history(self) -> History:
        """The record of the run: epochs, logged steps, the best values."""
        return History.from_events(self.events())

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of `model`: the best one, or the last where no best one is known."""
        if self._checkpoint is not None:
            return self._checkpoint
        if not self.checkpoints:
            raise UsageError(
                f"{self.name} has no checkpoint in {self.checkpoint_dir}",
                hint="Train with checkpoints: --checkpoint-frequency 1, or '500 steps'.",
            )
        return self.best_checkpoint or self.checkpoints[-1]

    @cached_property
    def classes(self) -> list[str]:
        """The names of the labels that it was trained with; empty where the data had none."""
        return list(read_manifest(self.checkpoint).shared.get("values", {}).get("classes", ()))

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, on the CPU and in eval mode."""
        model = self._given if self._given is not None else self._parts()[0]
        adapt(model, self.config)
        load_weights(model, self.checkpoint)
        return model.eval()

    @property
    def tokenizer(self) -> str | None:
        """The file tokenizer.json of a run that was trained on token shards, or with a tokenizer; None for bytes."""
        data = {} if self.recipe is None else self.recipe.fitted().data
        folder = data.get("tokenizer")
        if data.get("name") == "tokens":
            folder = data.get("root") or data["sources"][0]["path"]
        return None if folder is None else str(Path(folder) / "tokenizer.json")

    def data(self) -> tuple[Any, Any]:
        """Return the data for training and validation."""
        return self._parts()[1:]

    def _parts(self) -> tuple[nn.Module, Any, Any]:
        recipe = self.recipe
        if recipe is None:
            raise UsageError(
                f"{self.name} was not trained from a recipe, so its model and data are not known",
                hint="Give them: load_run(name, model=Net()), or --model my_package:Net --data my_package:load",
            )
        recipe.check()
        return recipe_parts(recipe, self.config.data_dir)

    def trainer(self, **settings: Any) -> Trainer:
        """Return a trainer of the model, with the run's settings and these."""
        base = _without_engine(self.config) if self.config.changed("backend") else self.config
        parts: dict[str, Any] = {}
        if self.recipe is not None:
            parts = {
                "loss_fn": recipe_loss(self.recipe, self.model),
                "metrics": recipe_metrics(self.recipe),
                "augment": recipe_augment(self.recipe, self.model),
            }
        changes = {**_on_one_machine(base), **settings}
        return Trainer(self.model, base.replace(**changes) if changes else base, **parts)

    def evaluate(self, data: Any = None, **settings: Any) -> dict[str, float]:
        """Return the loss and metrics on data; without any, on the run's validation data.

        Of a language model also the perplexity, exp of the mean loss of a token.
        """
        given = self.data()[1] if data is None else data
        if given is None:
            raise UsageError(f"{self.name} has no validation data", hint="Give data to evaluate on.")
        metrics = self.trainer(**settings).evaluate(given)
        # Of multiple choice, preferences and the like, the loss is not that of a text.
        writes = hasattr(self.model, "generate") and not implements(self.model, WrapsModel)
        if writes and "loss" in metrics and getattr(given, "metrics", None) is None:
            metrics["perplexity"] = math.exp(metrics["loss"]) if metrics["loss"] < _LARGEST_EXPONENT else math.inf
        return metrics

    def predict(self, data: Any, **settings: Any) -> Any:
        """Return the model's outputs for data, in its order."""
        return self.trainer(**settings).predict(data)

    def __repr__(self) -> str:
        steps, total = self.steps
        return f"SavedRun({self.name}, {self.status}, {steps} of {total or '?'} steps)"


def _on_one_machine(config: DistributedConfig) -> dict[str, Any]:
    """Return the changes by which a run of several machines is used on this one, with the ranks of one of them."""
    nodes = len(config.host_ranks) if config.hosts else config.num_nodes
    if nodes == 1:
        return {}
    alone: dict[str, Any] = dict.fromkeys(("hosts", "node_rank", "rdzv_endpoint", "min_workers"))
    return {**alone, "num_nodes": 1, "num_workers": max(1, (config.total_ranks or nodes) // nodes)}


def _without_engine(config: DistributedConfig) -> DistributedConfig:
    """Return the settings that matter for a model alone, where another engine trained it."""
    kept = ("batch_size", "mixed_precision", "seed", "data_dir", "device", "loss_weighting")
    return resolve({name: getattr(config, name) for name in kept}, environ={}).config


def load_run(name: str | Path, *, checkpoint: str | int | Path = "best", model: nn.Module | None = None) -> SavedRun:
    """Return a past run by its name in ./runs (or the beginning of it, a tag, "last"), its folder or a checkpoint.

    `checkpoint` is "best", "last", a step or a path. `model`: the model to load the weights into, for a run that was
    not trained from a recipe.
    """
    path = as_path(str(name))
    if (path / MANIFEST).is_file():  # a checkpoint: its run is two folders above, or unknown
        owner = path.absolute().parent.parent
        return SavedRun(owner if is_run(owner) else path, path, model)
    stored = _last_with_checkpoint() if str(name) == "last" else find_run(name)
    return SavedRun(stored.path, _chosen(stored, checkpoint), model)


def _last_with_checkpoint() -> StoredRun:
    """Return the run that "last" means where a model is needed, and say which it is."""
    if (found := next((run for run in list_runs() if run.checkpoints), None)) is None:
        return find_run("last")
    say_to_user(f"last is {found.name}")
    return found


def _chosen(stored: StoredRun, wanted: str | int | Path) -> Path | None:
    found = {path.name: path for path in stored.checkpoints}
    if str(wanted) == "best":
        return None
    if str(wanted) == "last" and found:
        return stored.checkpoints[-1]
    name = f"step-{int(str(wanted)):08d}" if str(wanted).isdecimal() else str(wanted)
    if name in found:
        return found[name]
    if (path := as_path(str(wanted)) / MANIFEST).is_file():
        return path.parent
    raise UsageError(
        f"{stored.name} has no checkpoint '{wanted}'; it has: {', '.join(found) or '(none)'}",
        hint="Write best, last, a step such as 200, or the path of a checkpoint.",
    )


def open_run(
    name: str, checkpoint: str, model: str | None, data: str | None, data_dir: str | None = None
) -> tuple[SavedRun, Any]:
    """Return a run of the command line with its validation data, either replaced by what --model and --data name.

    `data_dir`: another folder for the same kind of data.
    """
    run = load_run(name, checkpoint=checkpoint)
    if run.recipe is None and (model is None or data is None):
        missing = "--model" if model is None else "--data"
        raise UsageError(
            f"{run.name} was not trained from a recipe, so {missing} is needed",
            hint="Write: --model my_package.nets:Net --data my_package.data:load",
        )
    recipe = (run.recipe or Recipe(run.name, "", {}, {})).with_parts(model, data)
    recipe.check()
    extend_path(recipe.paths)
    own_dir = run.config.data_dir
    named = data is not None or data_dir is not None
    if named and takes(str(recipe.data["name"]), "val_fraction"):
        # Without a split of its own, everything that was named is measured: nothing of it was trained on.
        recipe = replace(recipe, data={**recipe.data, "val_fraction": 0.0})
    if named and run.classes and takes(str(recipe.data["name"]), "class_names"):
        # A label's number is that of the training data, also where a file lacks some of the labels.
        recipe = replace(recipe, data={**recipe.data, "class_names": run.classes})
    if run.recipe is not None and named:
        columns = {name: value for name, value in run.recipe.data.items() if name in ("inputs", "target", "text")}
        columns |= read_manifest(run.checkpoint).shared.get("values", {}).get("columns", {})
        if all(takes(str(recipe.data["name"]), name) for name in columns):  # another table of the same kind
            recipe = replace(recipe, data={**columns, **recipe.data})
        # Other texts are cut into the tokens that the model knows.
        recipe = replace(recipe, data=with_tokenizer(recipe.data, tokenizer_of(run.recipe, own_dir)))
    if data is not None and not is_import_path(data):
        own_dir = None  # the path is where the data are
    built, train, val = recipe_parts(recipe, own_dir if data_dir is None else data_dir)
    if run.recipe is None or model is not None:
        run = SavedRun(run.path, run._checkpoint, built)
    found = train if val is None and named else val
    if named and (found is None or (hasattr(found, "__len__") and not len(found))):
        raise UsageError(f"{data or data_dir} has no samples to measure", hint="Give files with at least one sample.")
    return run, found
