"""Recipes in a rank: data set and model are built and trained; a language model then writes a sample text."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.data.sets import load_splits
from phalanx.data.source import read_source
from phalanx.loop.forward import implied_loss
from phalanx.loop.hooks import Callback
from phalanx.loop.metrics import find_loss
from phalanx.loop.task import TrainTask
from phalanx.loop.trainer import TrainLoop
from phalanx.models.contract import InitialisesWeights, implements
from phalanx.models.registry import build, build_options, names
from phalanx.observe.events import SampleDrawn
from phalanx.recipes import Recipe
from phalanx.recipes.imports import extend_path, is_import_path, load_import
from phalanx.runs.result import JobResult
from phalanx.trainers.job import Job, run_job
from phalanx.trainers.session import is_large, rank_bytes
from phalanx.world.env import read_rank_env
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
        trainer.report.events.emit(SampleDrawn(trainer.step, as_text(drawn[0].tolist())))


def as_text(tokens: list[int]) -> str:
    """Return bytes as text that a terminal can show: an untrained model writes control characters as well."""
    text = bytes(token for token in tokens if token < _BYTES).decode("utf-8", errors="replace")
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _uncompiled(compiled: bool) -> AbstractContextManager[Any]:
    """Disable compilation: a text grows by one token per call, and compiling each length would take too long."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


_BATCH_SIZE = 32
"""For data sets of the user without a DataLoader, in a recipe that sets none."""
_LONGEST_TEXT = 1024
"""Longer windows of a corpus of some megabytes would be few."""


def run_recipe(recipe: Recipe, config: DistributedConfig, run_dir: Path | None, *, checked: bool) -> JobResult:
    """Build a recipe's parts (equal weights on all ranks, by the seed) and train; `checked`: see `Job`."""

    def build() -> Job:
        task = recipe_task(recipe, config)
        return Job("fit", task, with_batch_size(config, task.train), run_dir, checked, build)

    return run_job(build(), in_place=True)


def with_batch_size(config: DistributedConfig, train: Any) -> DistributedConfig:
    """Return the config with a batch size, where neither a setting nor a DataLoader gives one."""
    if config.batch_size is not None:
        return config
    source = read_source(train, pin_memory=False, notes=[])
    known = source.batch_size is not None or source.ready_batches or source.batch_sampler is not None
    return config if known else config.with_trusted(batch_size=_BATCH_SIZE)


def recipe_task(recipe: Recipe, config: DistributedConfig) -> TrainTask:
    """Build what a recipe describes: model, data, loss, optimizer, metrics and callbacks."""
    seed_everything(config.seed)
    model, train, val = recipe_parts(recipe, config.data_dir, without_storage=_is_large(recipe, config))
    callbacks: list[Any] = [SampleText(**recipe.sample)] if recipe.sample else []
    for path in recipe.callbacks:
        found = load_import(path, "callbacks")
        callbacks.append(found() if inspect.isclass(found) else found)
    return TrainTask(
        model,
        train,
        val,
        loss_fn=recipe_loss(recipe, model),
        optimizer=load_import(recipe.optimizer, "optimizer") if recipe.optimizer else None,
        metrics=recipe_metrics(recipe),
        callbacks=callbacks,
        name=config.name or recipe.name,
    )


def _is_large(recipe: Recipe, config: DistributedConfig) -> bool:
    """Whether every rank would hold a large part of its memory for weights that another one has, too.

    A large reference model is built without storage: each rank then allocates and initialises what it keeps.
    """
    env, name = read_rank_env(), recipe.model["name"]
    if env is None or env.world_size == 1 or name not in names():
        return False
    with torch.device("meta"):
        model = build(name, **{key: value for key, value in recipe.model.items() if key != "name"})
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    return implements(model, InitialisesWeights) and is_large(model, rank_bytes(device, env.local_world_size))


def recipe_metrics(recipe: Recipe) -> dict[str, Any] | None:
    """Return the functions of the recipe's metrics by name; None for the usual ones."""
    return {name: load_import(path, f"metrics.{name}") for name, path in recipe.metrics.items()} or None


def recipe_loss(recipe: Recipe, model: nn.Module) -> Any:
    """Return the recipe's loss; None where the model or the first batch decides."""
    if recipe.loss:
        return load_import(recipe.loss, "loss") if is_import_path(recipe.loss) else find_loss(recipe.loss)
    # A language model computes its loss itself, and a mixture of experts adds a term to it.
    own_model = is_import_path(recipe.model["name"]) or Path(recipe.model["name"]).is_absolute()
    return None if own_model or recipe.sample or hasattr(model, "loss_from_output") else implied_loss


def recipe_parts(recipe: Recipe, data_dir: str | None, *, without_storage: bool = False) -> tuple[nn.Module, Any, Any]:
    """Return a recipe's model and its data for training and validation; `without_storage`: a model on "meta"."""
    extend_path(recipe.paths)
    place = torch.device("meta") if without_storage else nullcontext()
    data = {**recipe.data, **({"root": data_dir} if data_dir is not None else {})}
    model = dict(recipe.model)
    name = model.pop("name")
    if Path(str(data["name"])).is_absolute() and "seq_len" in build_options(name):  # the user's files
        data.setdefault("seq_len", "model")
    if data.get("seq_len") == "model":
        with place:
            built: Any = build(name, **model)
        data["seq_len"] = min(built.config.seq_len, _LONGEST_TEXT)
        return built, *_both_splits(data)
    train, val = _both_splits(data)
    if hasattr(train, "classes") and "classes" in build_options(name):  # known only from the user's files
        model.setdefault("classes", len(train.classes))
    with place:
        return build(name, **model), train, val


def _both_splits(options: dict[str, Any]) -> tuple[Any, Any]:
    rest = {key: value for key, value in options.items() if key != "name"}
    train, val = load_splits(options["name"], **rest)
    return train, None if val is not None and hasattr(val, "__len__") and not len(val) else val
