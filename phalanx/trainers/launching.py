"""From the config to what the launcher is told. No torch here."""

from __future__ import annotations

import os
import signal
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx import errors
from phalanx.launch import CallTarget, LaunchSpec
from phalanx.launch.nccl import nccl_environment
from phalanx.launch.preload import PRELOAD
from phalanx.launch.record import any_record, read_record
from phalanx.world.tf_cluster import import_environment, tensorflow_modules
from phalanx.world.tf_config import ROLES_VARIABLE, roles_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from phalanx.config import DistributedConfig
    from phalanx.launch import LaunchResult
    from phalanx.launch.spec import Starter, Target
    from phalanx.world.layout import Layout


def launch_spec(
    config: DistributedConfig, layout: Layout, target: Target, log_dir: Path, *, env: Mapping[str, str]
) -> LaunchSpec:
    """Return the launch that the config asks for.

    Our own targets meet within `timeout` of their start; a user's script may prepare for hours before it does.
    """
    start_timeout = config.start_timeout
    if start_timeout is None and isinstance(target, CallTarget):
        start_timeout = config.timeout
    return LaunchSpec(
        target=target,
        ranks_per_node=layout.ranks_per_node,
        num_nodes=layout.num_nodes,
        node_rank=config.node_rank,
        rdzv_endpoint=config.rdzv_endpoint or "",
        env={**nccl_environment(config.nccl_env, os.environ), **engine_environment(config, layout.device), **env},
        log_dir=log_dir,
        labels=_labels(layout, target),
        console_ranks="all" if config.console_ranks == "all" else "0",
        max_restarts=config.max_restarts,
        grace_seconds=config.stop_grace,
        join_timeout=config.timeout,
        start_timeout=start_timeout,
        threads_per_rank=config.threads_per_rank,
        prelude="phalanx.world.tf_cluster:enter" if config.backend == "tensorflow" else "",
        starter=_starter(config, layout),
    )


def engine_environment(config: DistributedConfig, device: str) -> dict[str, str]:
    """Return what ranks need beside torch in their environment, and the process that they are forked from imports."""
    imports = ["mlflow"] if config.mlflow_tracking or config.mlflow_experiment else []
    found = {}
    if config.backend == "tensorflow":
        roles = roles_of(config)
        found = {ROLES_VARIABLE: ",".join(roles), **import_environment(os.environ, len(roles))}
        # What TensorFlow may do with a GPU while it is imported must not happen before a fork.
        imports = [*tensorflow_modules({**os.environ, **found}), *imports] if device == "cpu" else imports
    return {**found, PRELOAD: ",".join(imports)} if imports else found


_STARTERS = {"horovodrun": "phalanx.launch.horovodrun", "ray": "phalanx.launch.ray_train"}
"""Where other systems that start ranks are spoken to, by launcher."""


def _starter(config: DistributedConfig, layout: Layout) -> Starter | None:
    if config.launcher == "local":
        return None
    starter: Starter = import_module(_STARTERS[config.launcher]).starter(config, layout)
    return starter


def _labels(layout: Layout, target: Target) -> tuple[str, ...]:
    """Name the ranks by their places; a script lays out its ranks itself, unless the flags here say more than how many.

    Without names of ours the launcher calls them r0, r1, ...
    """
    mesh = layout.mesh
    is_told = sum(size > 1 for size in mesh.sizes.values()) > 1 or mesh.dp_size < mesh.world_size
    return layout.labels if isinstance(target, CallTarget) or layout.names or is_told else ()


def raise_failure(result: LaunchResult, log_dir: Path) -> None:
    """Turn how a launch ended into the exception that says so; a user's mistake found by a rank reads as one."""
    if result.exit_code == 0:
        return
    if result.exit_code == errors.EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    failure = result.failure
    record = any_record(log_dir) if failure is None else _record_of(failure.rank, log_dir)
    kind = getattr(errors, record["type"], None) if record is not None else None
    if record is not None and isinstance(kind, type) and issubclass(kind, errors.PhalanxError):
        raise errors.rebuild(kind, record["message"], record["hint"])
    if failure is not None:
        raise errors.RankFailedError(str(failure), exit_code=result.exit_code)
    if result.exit_code == errors.EXIT_PREEMPTED:
        raise errors.PreemptedError(f"the program left with exit code {result.exit_code}", hint=f"Logs: {log_dir}")
    raise errors.RankFailedError(_how_it_stopped(result.exit_code), exit_code=result.exit_code)


def _record_of(rank: int | None, log_dir: Path) -> dict[str, Any] | None:
    return None if rank is None else read_record(log_dir, rank)


def _how_it_stopped(code: int) -> str:
    by = {128 + number.value: number.name for number in (signal.SIGTERM, signal.SIGHUP)}
    return f"stopped by {by[code]}; no checkpoint was saved" if code in by else f"the ranks ended with exit code {code}"
