"""Checks of files and packages, before any process starts and any folder is made."""

from __future__ import annotations

import ast
import importlib.util
import os
from importlib import import_module
from pathlib import Path

from phalanx.config import deepspeed
from phalanx.config.engine_rules import missing_package
from phalanx.errors import (CheckpointError, UsageError)
from phalanx.launch import check_endpoint
from phalanx.engines.horovod.build import (installed_library, speaks_mpi)

from phalanx.config import DistributedConfig


_NVME = "phalanx.engines.deepspeed.nvme"


def check_before_start(config: DistributedConfig) -> None:
    """Raise for settings that need files or packages which this machine lacks."""
    check_packages(config)
    if config.offload == "nvme":
        import_module(_NVME).check_nvme(config)
    if config.num_nodes > 1 and config.rdzv_endpoint:
        check_endpoint(config.rdzv_endpoint)
    _check_resume(config)
    for name in ("checkpoint_dir", "tensorboard_dir", "run_dir"):
        _check_folder(name, getattr(config, name))


def check_script_starter(script: Path, starter: str) -> None:
    """Refuse a script that imports Horovod where another launcher starts its ranks: each would train alone."""
    if starter == "horovodrun" or not _imports_horovod(script):
        return
    if starter != "mpirun":
        why = "hvd.init() finds other ranks only where horovodrun started them"
    elif (library := installed_library()) is not None and not speaks_mpi(library):  # with MPI, mpirun may start them
        why = "this Horovod was built without MPI, which it would need to find them"
    else:
        return
    raise UsageError(
        f"{script} imports horovod, but {starter} would start its ranks, and {why}: each rank would train alone",
        hint=f"Write: phalanx train --script {script} --backend horovod, or horovodrun -np N python {script}",
    )


def slow_start(config: DistributedConfig) -> str | None:
    """Return the notice about a start that takes minutes, or None."""
    found: str | None = import_module(_NVME).slow_start(config) if config.offload == "nvme" else None
    return found


def _imports_horovod(script: Path) -> bool:
    """Whether the script imports Horovod at its top level; where it is optional, a branch imports it."""
    try:
        body = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False  # the rank that runs it reports it better
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level]
    return any(name.split(".")[0] == "horovod" for name in names)


def check_packages(config: DistributedConfig) -> None:
    """Refuse settings whose package is not installed, and name the extra with it."""
    if (config.mlflow_tracking or config.mlflow_experiment) and importlib.util.find_spec("mlflow") is None:
        raise UsageError(
            "mlflow_tracking needs MLflow, which is not installed", hint="Run: pip install 'phalanx[mlflow]'"
        )
    missing = missing_package(config)
    if missing is not None:
        raise UsageError(
            f"backend = {config.backend!r} needs {missing.title}, which is not installed", hint=missing.install
        )
    if deepspeed.is_missing(config.to_dict()):
        raise UsageError(deepspeed.MISSING, hint=deepspeed.INSTALL)


def _check_resume(config: DistributedConfig) -> None:
    wish = config.resume_from_checkpoint
    if wish is True and config.checkpoint_dir is None:
        raise UsageError(
            "resume_from_checkpoint = true needs to know where the checkpoints are",
            hint="Add checkpoint_dir, or give the checkpoint itself: resume_from_checkpoint = '<path>'.",
        )
    if isinstance(wish, str) and not Path(wish).exists():
        raise CheckpointError(
            f"resume_from_checkpoint = {wish!r}: there is nothing at that path",
            hint="Give a checkpoint (.../step-00000100) or the checkpoint_dir of an earlier run.",
        )


def _check_folder(name: str, given: str | None) -> None:
    """Refuse a folder that is a file or cannot be created; the rank that writes reports other errors."""
    if given is None:
        return
    path = Path(given)
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise CheckpointError(f"{name} = {given!r}: {nearest} is a file, not a folder", hint=f"Set {name} to a folder.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{name} = {given!r}: {nearest} is not writable", hint=f"Set {name} to a folder you may write to."
        )
