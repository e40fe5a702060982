"""Recipes in a rank: data set and model are built and trained; a language model then writes a sample text."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.data.sets import load
from phalanx.loop.forward import implied_loss
from phalanx.loop.hooks import Callback
from phalanx.loop.task import TrainTask
from phalanx.loop.trainer import TrainLoop
from phalanx.models.registry import build
from phalanx.recipes import Recipe
from phalanx.trainers.job import Job, JobResult, run_job
from phalanx.world.seed import seed_everything

_BYTES = 256


class SampleText(Callback):
    """After training, continues a prompt byte by byte. All ranks take part: each may hold a part of the model."""

    def __init__(self, prompt: str, count: int, *, temperature: float = 0.8) -> None:
        self.prompt = prompt
        self.count = count
        self.temperature = temperature

    def on_fit_end(self, trainer: TrainLoop) -> None:
        """Draw the text, the same on all ranks, and report it on the main rank."""
        formation = trainer.formation
        model: Any = formation.unwrap(trainer.model)
        mesh = formation.world.mesh
        tokens = torch.tensor([list(self.prompt.encode())], device=formation.device)
        generator = torch.Generator(formation.device).manual_seed(trainer.config.seed)
        with _uncompiled(trainer.config.compile), formation.autocast():
            drawn = model.generate(
                tokens,
                self.count,
                temperature=self.temperature,
                generator=generator,
                multiple=mesh.tp * (2 * mesh.cp if mesh.cp > 1 else 1),
                through=trainer.model if formation.strategy.shards else None,
            )
        trainer.report.say(f"sample:\n{as_text(drawn[0].tolist())}")


def as_text(tokens: list[int]) -> str:
    """Return bytes as text that a terminal can show: an untrained model writes control characters as well."""
    text = bytes(token for token in tokens if token < _BYTES).decode("utf-8", errors="replace")
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _uncompiled(compiled: bool) -> AbstractContextManager[Any]:
    """Disable compilation: a text grows by one token per call, and compiling each length would take too long."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


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


def recipe_parts(recipe: Recipe, data_dir: str | None, *, without_storage: bool = False) -> tuple[nn.Module, Any, Any]:
    """Return a recipe's model and its data for training and validation; `without_storage`: a model on "meta"."""
    place = torch.device("meta") if without_storage else nullcontext()
    options = {**recipe.data, **({"root": data_dir} if data_dir is not None else {})}
    model = dict(recipe.model)
    if recipe.needs_data_dir:
        train, val = _both_splits(options)
        if hasattr(train, "classes"):
            model["classes"] = len(train.classes)  # known only from the user's folder
        with place:
            return build(model.pop("name"), **model), train, val
    with place:
        built: Any = build(model.pop("name"), **model)
    if options.get("block_size") == "model":
        options["block_size"] = min(built.config.block_size, _LONGEST_TEXT)
    return built, *_both_splits(options)


def _both_splits(options: dict[str, Any]) -> tuple[Any, Any]:
    rest = {key: value for key, value in options.items() if key != "name"}
    train, val = (load(options["name"], split=split, **rest) for split in ("train", "val"))
    return train, val
