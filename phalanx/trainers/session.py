"""What surrounds the loop in every run: its folder, its saved config, its sinks."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from phalanx.config import write_toml
from phalanx.loop.reporting import tensorboard_dir
from phalanx.observe.fdsink import FdSink
from phalanx.observe.guard import Guard, say_to_user
from phalanx.observe.sinks import JsonlSink
from phalanx.observe.stream import EventStream, Sink

_FITS = itertools.count(1)

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.config import DistributedConfig
    from phalanx.world.world import World


def agree_run_dir(world: World, make: Callable[[], Path], *, goes_on: bool = False) -> Path:
    """Make the run's folder on the main rank and tell the others: by the clock each would name its own.

    The second fit of a script that the command line started has a folder of its own inside the command's; a fit that
    `goes_on` with other ranks has the one it had.
    """
    fits = 1 if goes_on else next(_FITS)
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
    """Write the resolved config beside the run, as TOML that `--config` takes."""
    header = "# The resolved settings of this run. Use them again with: phalanx train ... --config config.toml\n"
    path = run_dir / "config.toml"
    Guard(str(path), say_to_user).attempt(lambda: path.write_text(header + write_toml(config), encoding="utf-8"))


def open_events(config: DistributedConfig, world: World, run_dir: Path) -> EventStream:
    """Return this rank's stream: the main rank's has the launcher's console or our own, JSONL, TensorBoard, MLflow."""
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
    board = tensorboard_dir(config, run_dir)
    if board is not None:
        from phalanx.observe.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(board))
    if config.mlflow_tracking or config.mlflow_experiment is not None:
        from phalanx.observe.mlflow import MlflowSink

        named = (config.mlflow_experiment or "phalanx", config.name or run_dir.name)
        sinks.append(MlflowSink(*named, config.to_dict(), run_dir))
    return sinks
