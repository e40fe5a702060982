"""A recipe's data set and model, built in the rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.data.registry import load
from phalanx.loop.forward import implied_loss
from phalanx.loop.task import TrainTask
from phalanx.models.registry import build
from phalanx.recipes import load_recipe
from phalanx.trainers.job import Job, JobResult, run_job
from phalanx.world.seed import seed_everything

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.config import DistributedConfig


def run_recipe(name: str, config: DistributedConfig, run_dir: Path | None) -> JobResult:
    """Build a recipe's parts (equal weights on all ranks, by the seed) and train."""
    recipe = load_recipe(name)
    seed_everything(config.seed)
    data = dict(recipe.data)
    dataset = data.pop("name")
    options: dict[str, Any] = {**data, **({"root": config.data_dir} if config.data_dir is not None else {})}
    train, val = load(dataset, split="train", **options), load(dataset, split="val", **options)
    model = dict(recipe.model)
    if recipe.needs_data_dir and hasattr(train, "classes"):
        model["classes"] = len(train.classes)  # only the user's folder tells how many there are
    task = TrainTask(build(model.pop("name"), **model), train, val, loss_fn=implied_loss, name=config.name or name)
    return run_job(Job("fit", task, config, run_dir), in_place=True)
