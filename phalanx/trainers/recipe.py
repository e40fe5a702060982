"""A recipe's data set and model, built in the rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.data.registry import load
from phalanx.loop.forward import implied_loss
from phalanx.loop.task import TrainTask
from phalanx.models.registry import build
from phalanx.trainers.job import Job, JobResult, run_job
from phalanx.trainers.sampling import SampleText
from phalanx.world.seed import seed_everything

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from phalanx.config import DistributedConfig
    from phalanx.recipes import Recipe


_LONGEST_TEXT = 1024
"""Longer windows of a corpus of some megabytes would be few."""


def run_recipe(recipe: Recipe, config: DistributedConfig, run_dir: Path | None, *, checked: bool) -> JobResult:
    """Build a recipe's parts (equal weights on all ranks, by the seed) and train; `checked`: see `Job`."""
    seed_everything(config.seed)
    model, train, val = recipe_parts(recipe, config.data_dir)
    callbacks: list[Any] = [SampleText(**recipe.sample)] if recipe.sample else []
    # A language model computes its loss itself, and a mixture of experts adds a term to it.
    loss_fn = None if recipe.sample else implied_loss
    task = TrainTask(model, train, val, loss_fn=loss_fn, callbacks=callbacks, name=config.name or recipe.name)
    return run_job(Job("fit", task, config, run_dir, checked), in_place=True)


def recipe_parts(recipe: Recipe, data_dir: str | None) -> tuple[nn.Module, Any, Any]:
    """Return a recipe's model and its data for training and validation."""
    options = {**recipe.data, **({"root": data_dir} if data_dir is not None else {})}
    model = dict(recipe.model)
    if recipe.needs_data_dir:
        train, val = _both_splits(options)
        if hasattr(train, "classes"):
            model["classes"] = len(train.classes)  # only the user's folder tells how many there are
        return build(model.pop("name"), **model), train, val
    built: Any = build(model.pop("name"), **model)
    if options.get("block_size") == "model":
        options["block_size"] = min(built.config.block_size, _LONGEST_TEXT)
    return built, *_both_splits(options)


def _both_splits(options: dict[str, Any]) -> tuple[Any, Any]:
    rest = {key: value for key, value in options.items() if key != "name"}
    train, val = (load(options["name"], split=split, **rest) for split in ("train", "val"))
    return train, val
