"""Checks of files and packages, before any process starts and any folder is made."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from phalanx.config import DistributedConfig
from phalanx.config.backend_rules import missing_engine
from phalanx.engine import ENGINES, engine_of, find_engine
from phalanx.errors import EXIT_USAGE, CheckpointError, PhalanxError, UsageError
from phalanx.features import feature
from phalanx.host.remote import RemotePath, as_path
from phalanx.launch import check_endpoint
from phalanx.observe.sinks import check_sinks


def check_before_start(config: DistributedConfig) -> None:
    """Raise for settings that need files or packages which this machine lacks; the exit code is that of a mistake."""
    try:
        _check_all(config)
    except PhalanxError as error:
        error.exit_code = EXIT_USAGE
        raise


def _check_all(config: DistributedConfig) -> None:
    check_packages(config)
    engine_of(config).check(config)
    if config.num_nodes > 1 and config.rdzv_endpoint:
        check_endpoint(config.rdzv_endpoint)
    _check_resume(config)
    for name in ("checkpoint_dir", "tensorboard", "run_dir"):
        if isinstance(folder := getattr(config, name), str):
            _check_folder(name, folder)


def check_script_starter(script: Path, started_by: str) -> None:
    """Refuse a script made for an engine where another launcher would start its ranks."""
    for name in ENGINES:
        find_engine(name).check_script(script, started_by)


def check_packages(config: DistributedConfig) -> None:
    """Refuse settings whose package is not installed, and name the extra with it."""
    if config.mlflow and importlib.util.find_spec("mlflow") is None:
        raise UsageError("mlflow needs MLflow, which is not installed", hint="Run: pip install 'phalanx[mlflow]'")
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise UsageError(
            "wandb needs Weights & Biases, which is not installed", hint="Run: pip install 'phalanx[wandb]'"
        )
    if config.metrics_port is not None:
        feature("check-metrics")()
    check_sinks(config)
    if (missing := missing_engine(config.to_dict())) is not None:
        raise UsageError(missing[0], hint=missing[1])


def _check_resume(config: DistributedConfig) -> None:
    path = config.resume_from_checkpoint
    if path is True and config.checkpoint_dir is None:
        raise UsageError(
            "resume_from_checkpoint = true needs to know where the checkpoints are",
            hint="Add checkpoint_dir, or give the checkpoint itself: resume_from_checkpoint = '<path>'.",
        )
    if isinstance(path, str) and not as_path(path).exists():
        raise CheckpointError(
            f"resume_from_checkpoint = {path!r}: there is nothing at that path",
            hint="Give a checkpoint (.../step-00000100) or the checkpoint_dir of an earlier run.",
        )
    if isinstance(path, str) and as_path(path).is_dir() and not any(as_path(path).iterdir()):
        raise CheckpointError(
            f"resume_from_checkpoint = {path!r}: the folder is empty",
            hint="Give a checkpoint (.../step-00000100) or the checkpoint_dir of an earlier run.",
        )


def _check_folder(name: str, configured: str) -> None:
    """Refuse a folder that is a file or cannot be created; the rank that writes reports other errors."""
    path = as_path(configured)
    if isinstance(path, RemotePath):
        path.check_writable()
        return
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise CheckpointError(
            f"{name} = {configured!r}: {nearest} is a file, not a folder", hint=f"Set {name} to a folder."
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{name} = {configured!r}: {nearest} is not writable", hint=f"Set {name} to a folder you may write to."
        )
