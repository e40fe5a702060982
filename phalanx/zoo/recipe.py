"""Recipes in a rank: data set and model are built and trained; a language model then writes a sample text."""

from __future__ import annotations

import dataclasses
import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.data.source import read_source
from phalanx.loop.forward import implied_loss
from phalanx.loop.hooks import Callback
from phalanx.loop.metrics import cross_entropy, find_loss
from phalanx.loop.task import TrainTask
from phalanx.model import InitialisesWeights, WrapsModel, implements
from phalanx.observe.events import SampleDrawn
from phalanx.recipes import Recipe
from phalanx.recipes.imports import call_with, is_import_path, load_import, unknown_option
from phalanx.run.auto_strategy import is_large, rank_bytes
from phalanx.run.job import Job
from phalanx.world.env import read_rank_env
from phalanx.world.seed import seed_everything
from phalanx.zoo.models.registry import build, names
from phalanx.zoo.recipe_parts import loss_options, recipe_parts

if TYPE_CHECKING:
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.loop.train_loop import TrainLoop

_BYTES = 256


class SampleText(Callback):
    """After training, continues a prompt. All ranks take part: each may hold a part of the model.

    Without `tokenizer`, a file tokenizer.json, tokens are bytes.
    """

    def __init__(self, prompt: str, count: int, *, temperature: float = 0.8, tokenizer: str | None = None) -> None:
        self.prompt = prompt
        self.count = count
        self.temperature = temperature
        self.code = TextCode(tokenizer)

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """Draw the text, the same on all ranks, and report it on the main rank."""
        formation = trainer.formation
        model: Any = formation.unwrap(trainer.model)
        mesh = formation.world.mesh
        tokens = torch.tensor([self.code.encode(self.prompt)], device=formation.device)
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
        cast("TrainLoop", trainer).report.events.emit(SampleDrawn(trainer.step, self.code.decode(drawn[0].tolist())))


class TextCode:
    """Texts as tokens and back: those of a file tokenizer.json, or bytes."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer: Any = None
        if tokenizer is not None:
            from phalanx.zoo.data.token_shards import read_tokenizer  # few runs need it

            self._tokenizer = read_tokenizer(Path(tokenizer))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the tokens of a text; `special`: with those that the tokenizer puts around a text."""
        if self._tokenizer is None:
            return list(text.encode())
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return tokens

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        if self._tokenizer is None:
            return bytes(token for token in tokens if token < _BYTES).decode("utf-8", errors="replace")
        decoded: str = self._tokenizer.decode(tokens)
        return decoded

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, as a terminal can show it."""
        return printable(self.text(tokens))


def printable(text: str) -> str:
    """Return a text with a sign for control characters, which an untrained model writes as well."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _uncompiled(compiled: bool) -> AbstractContextManager[Any]:
    """Disable compilation: a text grows by one token per call, and compiling each length would take too long."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


_BATCH_SIZE = 32
"""For data sets of the user without a DataLoader, in a recipe that sets none."""


def recipe_job(recipe: Recipe, config: DistributedConfig, run_dir: Path | None = None, *, checked: bool) -> Job:
    """Build a recipe's parts (equal weights on all ranks, by the seed) and what trains them; `checked`: see `Job`."""
    task, sized = _sized_task(recipe, config)
    note = getattr(task.model, "weights_note", "")
    fitted = with_batch_size(config, task.train)
    return Job("fit", task, fitted, run_dir, checked, note=note, recipe=dataclasses.asdict(sized))


def with_batch_size(config: DistributedConfig, train: Any) -> DistributedConfig:
    """Return the config with a batch size, where neither a setting nor a DataLoader gives one."""
    if config.batch_size is not None:
        return config
    source = read_source(train, pin_memory=False, notes=[])
    is_known = source.batch_size is not None or source.ready_batches or source.batch_sampler is not None
    return config if is_known else config.with_trusted(batch_size=_BATCH_SIZE)


def recipe_task(recipe: Recipe, config: DistributedConfig) -> TrainTask:
    """Build what a recipe describes: model, data, loss, optimizer, metrics and callbacks."""
    return _sized_task(recipe, config)[0]


def _sized_task(recipe: Recipe, config: DistributedConfig) -> tuple[TrainTask, Recipe]:
    """Return a recipe's task, and the recipe with the sizes of its model."""
    seed_everything(config.seed)
    parts = recipe_parts(recipe, without_storage=_is_large(recipe, config))
    steps = recipe_steps(recipe, parts.model, parts.train)
    task = TrainTask(parts.model, parts.train, parts.val, name=config.name or recipe.name, **steps)
    return task, parts.recipe


def recipe_steps(recipe: Recipe, model: nn.Module, train: Any) -> dict[str, Any]:
    """Return what a recipe names beside its model and data, as a task takes it; a wrong name or option is refused."""
    callbacks: list[Any] = [SampleText(**recipe.sample)] if recipe.sample else []
    for path in recipe.callbacks:
        callback = load_import(path, "callbacks")
        callbacks.append(callback() if inspect.isclass(callback) else callback)
    return {
        "loss_fn": recipe_loss(recipe, model),
        "optimizer": load_import(recipe.optimizer, "optimizer") if recipe.optimizer else None,
        "metrics": recipe_metrics(recipe),
        "callbacks": callbacks,
        "augment": recipe_augment(recipe, model, train),
    }


def _is_large(recipe: Recipe, config: DistributedConfig) -> bool:
    """Whether every rank would hold a large part of its memory for weights that another one has, too.

    A large reference model is built without storage: each rank then allocates and initialises what it keeps.
    """
    env, name = read_rank_env(), recipe.model["name"]
    if env is None or env.world_size == 1 or name not in names():
        return False
    if "pretrained" in recipe.model:
        return False  # its weights are not drawn
    with torch.device("meta"):
        model = build(name, **{key: value for key, value in recipe.model.items() if key != "name"})
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    return implements(model, InitialisesWeights) and is_large(model, rank_bytes(device, env.local_world_size))


def recipe_metrics(recipe: Recipe) -> dict[str, Any] | None:
    """Return the functions of the recipe's metrics by name (of a class, an object); None for the usual ones."""
    if not recipe.metrics:
        return None
    from phalanx.zoo.scores import find_metric  # few runs need it

    return {name: find_metric(text, name) for name, text in recipe.metrics.items()}


def recipe_augment(recipe: Recipe, model: nn.Module, train: Any = None) -> Any:
    """Return what changes the recipe's batches on the device, if anything; without training data, for evaluation."""
    options: dict[str, Any] = {}
    for key, value in recipe.augment.items():
        options[key] = tuple(value) if isinstance(value, list) else value
    if not options:
        return None
    if name := options.pop("name", ""):
        return call_with(load_import(name, "augment"), options, f"augment '{name}'")
    from phalanx.zoo.data.augment import Augment

    if train is None:
        options |= {"mixup": 0.0, "cutmix": 0.0}
    classes = len(train.classes) if hasattr(train, "classes") else getattr(_config_of(model), "classes", None)
    return call_with(Augment, {"classes": classes, **options}, "augment")


def _config_of(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def recipe_loss(recipe: Recipe, model: nn.Module) -> Any:
    """Return the recipe's loss; None where the model or the first batch decides."""
    if implements(model, WrapsModel):
        return None
    if recipe.loss:
        return _made_loss(*loss_options(recipe))
    if recipe.augment:
        return cross_entropy  # of labels, and of the shares of classes that mixup makes of them
    # A language model computes its loss itself, and a mixture of experts adds a term to it.
    own_model = is_import_path(recipe.model["name"]) or Path(recipe.model["name"]).is_absolute()
    return None if own_model or recipe.sample or hasattr(model, "loss_from_output") else implied_loss


def _made_loss(name: str, options: dict[str, Any]) -> Any:
    """Return a loss by name or import path; options are given to its class, or with every call of a function."""
    loss: Any = load_import(name, "loss") if is_import_path(name) else find_loss(name)
    if inspect.isclass(loss):
        return call_with(loss, options, f"loss '{name}'")
    if not options:
        return loss
    parameters = list(inspect.signature(loss).parameters)[2:]
    for option in options:
        if option not in parameters:
            raise unknown_option(f"loss '{name}'", option, parameters)
    return partial(loss, **options)
