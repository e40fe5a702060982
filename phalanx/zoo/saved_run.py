"""`load_run`: a past run in Python, with its model, config and history; and how it is evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.checkpoint.manifest import MANIFEST, read_manifest
from phalanx.config import DistributedConfig, resolve
from phalanx.config.sources import read_settings
from phalanx.errors import UsageError
from phalanx.host.remote import as_path
from phalanx.loop.model_setup import adapt
from phalanx.model import WrapsModel, implements
from phalanx.observe.guard import say_to_user
from phalanx.observe.history import History
from phalanx.recipes import Recipe
from phalanx.recipes.imports import extend_path
from phalanx.run.stored import StoredRun, find_run, is_run, list_runs
from phalanx.run.trainer import Trainer
from phalanx.run.weights import load_weights
from phalanx.zoo.given_data import Given, check_changes, given_table
from phalanx.zoo.recipe import recipe_augment, recipe_loss, recipe_metrics
from phalanx.zoo.recipe_parts import given_data, given_parts, recipe_model, recipe_parts

_LARGEST_EXPONENT = 700
_OF_THE_RUN = ("run_dir", "checkpoint_dir", "resume_from_checkpoint", "tensorboard", "name")


class SavedRun(StoredRun):
    """A run on disk. `model` has the weights of the best checkpoint, or of the one that was asked for."""

    _checkpoint: Path | None
    _given: nn.Module | None

    def __init__(self, path: Path, checkpoint: Path | None = None, model: nn.Module | None = None) -> None:
        super().__init__(path)
        self.__dict__.update(_checkpoint=checkpoint, _given=model)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that it trained; of a run that is not trusted, None if the model was given."""
        return None if self._given is not None and not self.is_trusted else super().recipe

    @cached_property
    def config(self) -> DistributedConfig:
        """All settings, without those about its own folders; of a run that is not trusted, those of a model alone."""
        path = self.path / "config.toml"
        settings = read_settings(path) if path.is_file() else {}
        resolved = resolve({n: v for n, v in settings.items() if n not in _OF_THE_RUN}, environ={}).config
        return resolved if self.is_trusted else _of_the_model(resolved)

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
        model = self._given if self._given is not None else recipe_model(self._known_recipe())
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
        parts = recipe_parts(self._known_recipe())
        return parts.train, parts.val

    @property
    def learned(self) -> dict[str, Any]:
        """What the checkpoint keeps of the training data, as options of a data set."""
        values = read_manifest(self.checkpoint).shared.get("values", {})
        classes = values.get("classes")
        return {**values.get("columns", {}), **({"class_names": list(classes)} if classes else {})}

    def read(self, source: Given | None = None, *, needs_target: bool = True, **options: Any) -> Any:
        """Return data as the model takes them: files, a data set by name, an import path; else the validation data.

        Files are read with the options of the run's own data (the size of images, columns, classes, tokenizer), of
        which `options` replaces some: the validation part of a folder that has one, else everything. Without
        `needs_target` they may lack labels: a table without that column, images in any folder.
        """
        if source is None:
            recipe = self._known_recipe()
            data = recipe_parts(replace(recipe, data={**recipe.data, **options})).val
            return _not_empty(data, self, None)
        recipe = self.recipe or Recipe(self.name, "", {}, {})
        extend_path(recipe.paths)
        table = given_table(recipe, source, self.learned, options, needs_target=needs_target)
        return _not_empty(given_data(table, self.model), self, source)

    def _known_recipe(self) -> Recipe:
        recipe = self.recipe
        if recipe is None:
            raise UsageError(
                f"{self.name} was not trained from a recipe, so its model and data are not known",
                hint="Give them: load_run(name, model=Net()), or --model my_package:Net --data my_package:load",
            )
        recipe.check()
        return recipe

    def trainer(self, **settings: Any) -> Trainer:
        """Return a trainer of the model, with the run's settings and these."""
        base = _of_the_model(self.config) if self.config.changed("backend") else self.config
        parts: dict[str, Any] = {}
        if self.recipe is not None:
            parts = {
                "loss_fn": recipe_loss(self.recipe, self.model),
                "metrics": recipe_metrics(self.recipe),
                "augment": recipe_augment(self.recipe, self.model),
            }
        changes = {**_on_one_node(base), **settings}
        return Trainer(self.model, base.replace(**changes) if changes else base, **parts)

    def evaluate(self, data: Any = None, **settings: Any) -> dict[str, float]:
        """Return the loss and metrics on data, also by name or path (`read`); without any, on the validation data.

        Of a language model also the perplexity, exp of the mean loss of a token.
        """
        loaded = self.read(data) if data is None or _is_named(data) else data
        metrics = self.trainer(**settings).evaluate(loaded)
        # Of multiple choice, preferences and the like, the loss is not that of a text.
        writes = hasattr(self.model, "generate") and not implements(self.model, WrapsModel)
        if writes and "loss" in metrics and getattr(loaded, "metrics", None) is None:
            metrics["perplexity"] = math.exp(metrics["loss"]) if metrics["loss"] < _LARGEST_EXPONENT else math.inf
        return metrics

    def predict(self, data: Any, **settings: Any) -> Any:
        """Return the model's outputs for data, in its order; files, also unlabelled ones, by their paths (`read`)."""
        return self.trainer(**settings).predict(self.read(data, needs_target=False) if _is_named(data) else data)

    def __repr__(self) -> str:
        steps, total = self.steps
        return f"SavedRun({self.name}, {self.status}, {steps} of {total or '?'} steps)"


def _is_named(data: Any) -> bool:
    """Whether data are given by a name or by paths."""
    return isinstance(data, str | Path) or (
        isinstance(data, list) and bool(data) and all(isinstance(item, str | Path) for item in data)
    )


def _on_one_node(config: DistributedConfig) -> dict[str, Any]:
    """Return the changes by which a run of several machines is used on this one, with the ranks of one of them."""
    nodes = len(config.host_ranks) if config.hosts else config.num_nodes
    if nodes == 1:
        return {}
    alone: dict[str, Any] = dict.fromkeys(("hosts", "node_rank", "rdzv_endpoint", "min_workers"))
    return {**alone, "num_nodes": 1, "num_workers": max(1, (config.total_ranks or nodes) // nodes)}


def _of_the_model(config: DistributedConfig) -> DistributedConfig:
    """Return the settings that matter for a model alone: another engine or another user trained it."""
    names = ("batch_size", "mixed_precision", "seed", "device", "loss_weighting")
    return resolve({name: getattr(config, name) for name in names}, environ={}).config


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
    if (stored := next((run for run in list_runs() if run.is_trusted and run.checkpoints), None)) is None:
        return find_run("last")
    say_to_user(f"last is {stored.name}")
    return stored


def _chosen(stored: StoredRun, name_or_step: str | int | Path) -> Path | None:
    checkpoints = {path.name: path for path in stored.checkpoints}
    if str(name_or_step) == "best":
        return None
    if str(name_or_step) == "last" and checkpoints:
        return stored.checkpoints[-1]
    name = f"step-{int(str(name_or_step)):08d}" if str(name_or_step).isdecimal() else str(name_or_step)
    if name in checkpoints:
        return checkpoints[name]
    if (path := as_path(str(name_or_step)) / MANIFEST).is_file():
        return path.parent
    raise UsageError(
        f"{stored.name} has no checkpoint '{name_or_step}'; it has: {', '.join(checkpoints) or '(none)'}",
        hint="Write best, last, a step such as 200, or the path of a checkpoint.",
    )


def open_run(
    name: str,
    checkpoint: str = "best",
    *,
    model: str | None = None,
    data: Given | None = None,
    changes: Mapping[str, Any] | None = None,
    needs_target: bool = True,
) -> tuple[SavedRun, Any]:
    """Return a run of the command line with the data that it is asked about; see `SavedRun.read`.

    `model`: an import path or a reference model, where the run was not trained from a recipe.
    """
    run, options = load_run(name, checkpoint=checkpoint), check_changes(changes or {})
    recipe_of_run = run.recipe if model is None or run.is_trusted else None
    if recipe_of_run is None and (model is None or data is None):
        missing = "--model" if model is None else "--data"
        why = "was not trained from a recipe" if run.is_trusted else "may be another user's"
        raise UsageError(
            f"{run.name} {why}, so {missing} is needed",
            hint="Write: --model my_package.nets:Net --data my_package.data:load",
        )
    if model is None:
        return run, run.read(data, needs_target=needs_target, **options)
    recipe = (recipe_of_run or Recipe(run.name, "", {}, {})).with_parts(model, None)
    if data is not None:
        table = given_table(recipe, data, run.learned, options, needs_target=needs_target)
        recipe = replace(recipe, data=table)
    recipe.check()
    if data is not None:
        built, dataset = given_parts(recipe)
    else:
        built, _, dataset, _ = recipe_parts(recipe)
    return SavedRun(run.path, run._checkpoint, built), _not_empty(dataset, run, data)


def _not_empty(data: Any, run: SavedRun, source: Any) -> Any:
    """Return data; refuse those without a sample, of which there would be no answer."""
    if data is None and source is None:
        raise UsageError(f"{run.name} has no validation data", hint="Name data: --data ./my-files")
    if data is None or (hasattr(data, "__len__") and not len(data)):
        raise UsageError(f"{source} has no samples", hint="Give files with at least one sample.")
    return data
