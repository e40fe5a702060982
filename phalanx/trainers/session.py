"""What a run needs before its loop: checks, a strategy where none is named, its folder, its saved config, its sinks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from phalanx.config import FIELDS, DistributedConfig, write_toml
from phalanx.config.backends import DEFAULT_STRATEGY
from phalanx.config.distributed import RECORD_HEADER
from phalanx.config.settings import settings_with
from phalanx.errors import PhalanxError
from phalanx.host.gpus import count_gpus, gpu_memory, ranks_per_gpu
from phalanx.host.processes import host_memory
from phalanx.loop.reporting import tensorboard_dir
from phalanx.observe.guard import Guard, say_to_user
from phalanx.observe.sinks import EventStream, FdSink, JsonlSink, Sink, outside_sinks
from phalanx.world.env import read_rank_env
from phalanx.world.world import World

_FITS = itertools.count(1)


def check_per_node(world: World, config: DistributedConfig) -> None:
    """Run the checks before a start on the first rank of each machine; raise on all ranks what one of them found."""
    found: PhalanxError | None = None
    if world.env.local_rank == 0:
        from phalanx.runs.preflight import check_before_start

        try:
            check_before_start(config)
        except PhalanxError as error:
            found = error
    errors = [found]
    if world.world_size > 1:
        errors *= world.world_size
        dist.all_gather_object(errors, found)
    for each in filter(None, errors):
        raise each


def agree_run_dir(world: World, make: Callable[[], Path], *, resumes: bool = False) -> Path:
    """Make the run's folder on the main rank and broadcast its path: by each rank's clock the names would differ.

    The second fit of a script that the command line started has a folder inside that of the command; a fit that
    `resumes` with other ranks keeps its folder.
    """
    fits = 1 if resumes else next(_FITS)
    names: list[Any] = [None]
    if world.is_main:
        run_dir = make()
        if fits > 1 and str(run_dir) == os.environ.get("PHALANX_RUN_DIR"):
            run_dir = run_dir / f"fit-{fits}"
            run_dir.mkdir(exist_ok=True)
        names = [str(run_dir)]
    if world.world_size > 1:
        dist.broadcast_object_list(names, src=0)
    return Path(names[0])


def save_config(config: DistributedConfig, run_dir: Path) -> None:
    """Write the resolved config to the run's folder, as TOML that `--config` reads."""
    header = f"{RECORD_HEADER} Use them again with: phalanx train ... --config config.toml\n"
    path = run_dir / "config.toml"
    Guard(str(path), say_to_user).attempt(lambda: path.write_text(header + write_toml(config), encoding="utf-8"))


def open_events(config: DistributedConfig, world: World, run_dir: Path) -> EventStream:
    """Return the event stream of this rank; only the main rank has sinks (console, JSONL, TensorBoard, MLflow)."""
    return EventStream(open_sinks(config, run_dir) if world.is_main else (), rank=world.rank)


def open_sinks(config: DistributedConfig, run_dir: Path) -> list[Sink]:
    """Return the sinks that the config asks for; those of services continue their run where this one is resumed."""
    env = read_rank_env()
    resumes = bool(config.resume_from_checkpoint) or (env is not None and env.attempt + env.generation > 0)
    sinks: list[Sink] = [JsonlSink(run_dir / "events.jsonl")]
    to_launcher = FdSink.from_environment()
    if to_launcher is not None:
        sinks.append(to_launcher)
    else:
        from phalanx.observe.console import Console
        from phalanx.observe.prometheus import open_metrics

        sinks.append(Console(progress=config.shown.progress, verbosity=config.shown.verbosity))
        if (served := open_metrics(run_dir.name, None, config.metrics_address)) is not None:
            say_to_user(f"metrics: {served.url}")
            sinks.append(served)
    folder = tensorboard_dir(config, run_dir)
    if folder is not None:
        from phalanx.observe.tensorboard import TensorBoardSink

        settings = [line for line in write_toml(config).splitlines() if not line.startswith("#")]
        sinks.append(TensorBoardSink(folder, hyperparameters(config), "\n".join(settings)))
    if config.mlflow:
        from phalanx.observe.mlflow import MlflowSink

        named = (config.mlflow if isinstance(config.mlflow, str) else "phalanx", config.name or run_dir.name)
        sinks.append(MlflowSink(*named, config.to_dict(), run_dir, resumes=resumes))
    if config.wandb:
        from phalanx.observe.wandb import WandbSink

        project = config.wandb if isinstance(config.wandb, str) else None
        sinks.append(WandbSink(run_dir, project, config.name or run_dir.name, config.to_dict(), resumes=resumes))
    return [*sinks, *outside_sinks(config, run_dir)]


_COMPARED = ("batch_size", "learning_rate", "optimizer", "weight_decay", "strategy", "mixed_precision", "seed")


def hyperparameters(config: DistributedConfig) -> dict[str, bool | float | str]:
    """Return the settings by which runs are compared: the usual ones, and those that differ from their defaults."""
    changed = (name for name, field in FIELDS.items() if getattr(config, name) != field.default)
    names = dict.fromkeys([*_COMPARED, *(name for name in changed if "place" not in FIELDS[name].metadata["scope"])])
    found = {name: getattr(config, name) for name in names}
    return {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in found.items()
        if value is not None
    }


_STATE_BYTES = 16
"""Of one parameter with AdamW: weights, gradients and optimizer states, in fp32 or in mixed precision."""


class Settled(NamedTuple):
    """A config whose strategy is decided, and why it was changed (empty: it was not)."""

    config: DistributedConfig
    note: str = ""


def settle_here(config: DistributedConfig, model: nn.Module, train: Any) -> Settled:
    """Decide in a rank that a launcher started; see `settle_strategy`."""
    env = read_rank_env()
    if env is None:
        return Settled(config)
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return settle_strategy(config, model, train, device, env.planned or env.world_size, env.local_world_size)


def settle_strategy(
    config: DistributedConfig, model: nn.Module, train: Any, device: str, ranks: int, ranks_here: int
) -> Settled:
    """Choose fsdp where strategy = "auto" and whole copies of the training state would not fit on the ranks.

    The planner decides (`phalanx/tools/plan/auto.py`). It is asked only where nothing was chosen by the user and the
    parameters are so many that it may matter: all ranks have the same facts, and decide alike.
    """
    undecided = config.strategy == "auto" and config.resolved_strategy == DEFAULT_STRATEGY
    chosen = config.changed("backend", *settings_with("layout"))
    if ranks == 1 or not undecided or chosen:
        return Settled(config)
    memory = rank_bytes(device, ranks_here)
    if not memory or not is_large(model, memory):
        return Settled(config)
    from phalanx.tool import tool

    return Settled(*tool("choose-strategy")(config, model, train, device, ranks, memory))


def is_large(model: nn.Module, memory: int) -> bool:
    """Whether the states of a model's parameters take a quarter of a rank's memory or more."""
    return sum(parameter.numel() for parameter in model.parameters()) * _STATE_BYTES > memory / 4


def rank_bytes(device: str, ranks_here: int) -> int:
    """Return a rank's share of its GPU's memory, or of the host's; 0: not known."""
    if device == "cuda":
        return gpu_memory() // ranks_per_gpu(ranks_here, count_gpus())
    return host_memory() // ranks_here
