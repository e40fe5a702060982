"""A run's folder, its saved config, and the sinks of its events: what the settings ask for."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from phalanx.config import DistributedConfig, write_toml
from phalanx.config.distributed import RECORD_HEADER
from phalanx.features import feature
from phalanx.observe.events import Message
from phalanx.observe.guard import Guard, say_to_user
from phalanx.observe.run_folder import note_written
from phalanx.observe.sinks import EventStream, FdSink, JsonlSink, Sink, outside_sinks
from phalanx.world.env import read_rank_env
from phalanx.world.world import World

_NUMBERS = itertools.count(1)
_NO_TENSORBOARD = "tensorboard: not installed, so no curves are written. Run: pip install 'phalanx[tensorboard]'"


def agree_run_dir(world: World, make: Callable[[], Path], *, resumes: bool = False) -> Path:
    """Make the run's folder on the main rank and broadcast its path: by each rank's clock the names would differ."""
    names = [str(own_run_dir(make, resumes=resumes)) if world.is_main else None]
    if world.world_size > 1:
        dist.broadcast_object_list(names, src=0)
    return Path(str(names[0]))


def own_run_dir(make: Callable[[], Path], *, resumes: bool = False) -> Path:
    """Make the folder of a fit, or of a loop of the user's.

    The second one of a script that the command line started has a folder inside that of the command; one that
    `resumes` with other ranks keeps its folder.
    """
    number, run_dir = 1 if resumes else next(_NUMBERS), make()
    if number > 1 and str(run_dir) == os.environ.get("PHALANX_RUN_DIR"):
        folder = run_dir / f"fit-{number}"
        folder.mkdir(exist_ok=True)
        note_written(run_dir, folder)
        return folder
    return run_dir


def save_config(config: DistributedConfig, run_dir: Path) -> None:
    """Write the resolved config to the run's folder, as TOML that `--config` reads."""
    header = f"{RECORD_HEADER} Use them again with: phalanx train ... --config config.toml\n"
    path = run_dir / "config.toml"
    Guard(str(path), say_to_user).attempt(lambda: path.write_text(header + write_toml(config), encoding="utf-8"))


def open_events(config: DistributedConfig, world: World, run_dir: Path) -> EventStream:
    """Return the event stream of this rank; only the main rank has sinks (console, JSONL, TensorBoard, MLflow)."""
    return EventStream(open_sinks(config, run_dir) if world.is_main else (), rank=world.rank)


def open_sinks(config: DistributedConfig, run_dir: Path, *, console: bool = True) -> list[Sink]:
    """Return the sinks that the config asks for; those of services continue their run where this one is resumed.

    `console`: whether a run that no launcher shows is shown here.
    """
    env = read_rank_env()
    resumes = bool(config.resume_from_checkpoint) or (env is not None and env.attempt + env.generation > 0)
    sinks: list[Sink] = [JsonlSink(run_dir / "events.jsonl")]
    to_launcher = FdSink.from_environment()
    if to_launcher is not None:
        sinks.append(to_launcher)
    elif console:
        from phalanx.observe.console import Console  # the launcher has it, if there is one

        sinks.append(Console(progress=config.progress, verbosity=config.verbosity))
        if config.metrics_address is not None:
            served = feature("metrics")(run_dir.name, None, config.metrics_address)
            say_to_user(f"metrics: {served.url}")
            sinks.append(served)
    folder = tensorboard_dir(config, run_dir)
    if folder is None and _wants_tensorboard(config):
        if to_launcher is None and not console:
            say_to_user(_NO_TENSORBOARD)
        for sink in sinks:
            sink.handle(Message("warning", _NO_TENSORBOARD, rank=0))
    if folder is not None or config.mlflow or config.wandb:
        sinks += feature("trackers")(config, run_dir, tensorboard=folder, resumes=resumes)
    return [*sinks, *outside_sinks(config, run_dir)]


def tensorboard_dir(config: DistributedConfig, run_dir: Path) -> str | None:
    """Return where TensorBoard files go; None if none are wanted, or TensorBoard is not installed."""
    if not _wants_tensorboard(config) or importlib.util.find_spec("tensorboard") is None:
        return None
    return str(config.tensorboard) if isinstance(config.tensorboard, str) else str(run_dir)


def _wants_tensorboard(config: DistributedConfig) -> bool:
    return bool(config.tensorboard or config.tensorboard_histograms)
