"""What a run needs besides the loop: checks, its folder, its saved config, its sinks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.config import DistributedConfig, write_toml
from phalanx.errors import PhalanxError
from phalanx.loop.reporting import tensorboard_dir
from phalanx.observe.guard import Guard, say_to_user
from phalanx.observe.sinks import EventStream, FdSink, JsonlSink, Sink
from phalanx.runs.preflight import check_before_start
from phalanx.world.world import World

_FITS = itertools.count(1)


def check_per_host(world: World, config: DistributedConfig) -> None:
    """Run the checks before a start on the first rank of each machine; raise on all ranks what one of them found."""
    found: PhalanxError | None = None
    if world.env.local_rank == 0:
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
    header = "# The resolved settings of this run. Use them again with: phalanx train ... --config config.toml\n"
    path = run_dir / "config.toml"
    Guard(str(path), say_to_user).attempt(lambda: path.write_text(header + write_toml(config), encoding="utf-8"))


def open_events(config: DistributedConfig, world: World, run_dir: Path) -> EventStream:
    """Return the event stream of this rank; only the main rank has sinks (console, JSONL, TensorBoard, MLflow)."""
    return EventStream(open_sinks(config, run_dir) if world.is_main else (), rank=world.rank)


def open_sinks(config: DistributedConfig, run_dir: Path) -> list[Sink]:
    """Return the sinks that the config asks for."""
    sinks: list[Sink] = [JsonlSink(run_dir / "events.jsonl")]
    to_launcher = FdSink.from_environment()
    if to_launcher is not None:
        sinks.append(to_launcher)
    elif config.progress:
        from phalanx.observe.console import Console

        sinks.append(Console())
    folder = tensorboard_dir(config, run_dir)
    if folder is not None:
        from phalanx.observe.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(folder))
    if config.mlflow_tracking or config.mlflow_experiment is not None:
        from phalanx.observe.mlflow import MlflowSink

        named = (config.mlflow_experiment or "phalanx", config.name or run_dir.name)
        sinks.append(MlflowSink(*named, config.to_dict(), run_dir))
    return sinks
