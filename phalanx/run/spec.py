"""From the config to a `LaunchSpec`, and what ranks get by environment variables and files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from phalanx.config import FIELDS, DistributedConfig, ResolvedConfig
from phalanx.config.run_fields import Monitoring
from phalanx.config.settings import ENV_PREFIX, settings_with
from phalanx.engine import VARIABLE, engine_name, engine_of
from phalanx.features import FEATURES
from phalanx.host.gpus import driver_version
from phalanx.launch import CallTarget, LaunchSpec
from phalanx.launch.forkserver.preload import PRELOAD
from phalanx.launch.nccl import nccl_environment
from phalanx.launch.spec import Elastic, ScriptTarget, Target
from phalanx.recipes import Recipe
from phalanx.version import __version__
from phalanx.world.mesh import JobLayout


def launch_spec(
    config: DistributedConfig,
    layout: JobLayout,
    target: Target,
    log_dir: Path,
    *,
    env: Mapping[str, str] | None = None,
    data: Mapping[str, Any] | None = None,
    launched: float | None = None,
) -> LaunchSpec:
    """Return the launch that the config describes.

    `launched`: when the command began, if not now. Phalanx's own targets join within `timeout` of their start; a user's
    script may prepare for hours before it does.
    """
    # Ranks of scripts are labelled r0, r1, ... unless flags set more than a count.
    mesh = layout.mesh
    is_set = sum(size > 1 for size in mesh.sizes.values()) > 1 or mesh.dp_size < mesh.world_size
    start_timeout = config.start_timeout
    if start_timeout is None and isinstance(target, CallTarget):
        start_timeout = config.timeout
    starter = engine_of(config).starter(config, layout)
    return LaunchSpec(
        target=target,
        ranks_per_node=layout.ranks_per_node,
        num_nodes=layout.num_nodes,
        node_rank=config.node_rank,
        rdzv_endpoint=config.rdzv_endpoint or "",
        env={
            **nccl_environment(config.nccl_env, os.environ),
            **engine_environment(config, layout.device),
            **(env or {}),
        },
        log_dir=log_dir,
        launched=time.time() if launched is None else launched,
        labels=layout.labels if isinstance(target, CallTarget) or layout.names or is_set else (),
        console_ranks=config.console_ranks,
        max_restarts=config.max_restarts,
        grace_seconds=config.stop_grace,
        join_timeout=config.timeout,
        start_timeout=start_timeout,
        ranks_per_gpu=layout.ranks_per_gpu if config.share_gpus else 1,
        threads_per_rank=config.threads_per_rank,
        data=data or {},
        prelude=engine_of(config).prelude,
        identity=identity(config, target) if layout.num_nodes > 1 else {},
        elastic=plan_elastic(config, layout, target) if starter is None else None,
        starter=starter,
    )


def identity(config: DistributedConfig, target: Target) -> dict[str, str]:
    """Return what all nodes of a run must have in common: versions, the script, and settings that decide numbers."""
    free = {*settings_with("machine"), *Monitoring.__dataclass_fields__}
    names = [name for name in FIELDS if name not in free]
    facts = {"phalanx": __version__, "torch": version("torch").partition("+")[0]}
    if config.share_gpus:
        facts["NVIDIA driver"] = driver_version()
    if isinstance(target, ScriptTarget) and Path(target.path).is_file():  # else `check` says what is wrong
        facts["script"] = hashlib.sha256(Path(target.path).read_bytes()).hexdigest()[:12]
    return {**facts, **{name: repr(getattr(config, name)) for name in names}}


RUN_JOB = FEATURES["run-job"]
"""What a rank calls with the file of a job."""
_IN_PLACE = (RUN_JOB, FEATURES["verify-rank"])


def plan_elastic(config: DistributedConfig, layout: JobLayout, target: Target) -> Elastic | None:
    """Return how lost ranks are replaced in place; None where all are started again, or the run ends."""
    is_elastic = config.max_restarts > 0 or config.min_workers is not None
    trains = isinstance(target, CallTarget) and target.function in _IN_PLACE
    if not is_elastic or not trains or engine_name(config) or config.recovery == "restart":
        return None
    sizes = elastic_sizes(config, layout.world_size)
    return Elastic(tuple(sizes), config.spares, config.heartbeat_timeout, config.stall_timeout)


def elastic_sizes(config: DistributedConfig, most: int) -> list[int]:
    """Return the numbers of ranks that a run may go on with, the largest first."""
    least = config.min_workers or most
    allowed = [size for size in range(most, least - 1, -1) if size == most or config.recovery == "resize"]
    return [size for size in allowed if not config.fixed_order or size.bit_count() == 1]


def engine_environment(config: DistributedConfig, device: str) -> dict[str, str]:
    """Return the variables of ranks for packages other than torch, which the fork server imports too."""
    variables, imports = engine_of(config).environment(config, device)
    if config.mlflow:
        imports = [*imports, "mlflow"]
    name = engine_name(config)
    if name or VARIABLE in os.environ:  # a run inside a rank of an engine is not one of that engine
        variables = {**variables, VARIABLE: name}
    return {**variables, PRELOAD: ",".join(imports)} if imports else variables


def recipe_target(recipe: Recipe, config: DistributedConfig, run_dir: Path, folder: Path) -> CallTarget:
    """Write the recipe and its config into `folder`, and return the target that runs them."""
    request = {"recipe": dataclasses.asdict(recipe), "config": config.to_dict(), "run_dir": str(run_dir)}
    payload = folder / "recipe.json"
    payload.write_text(json.dumps(request), encoding="utf-8")
    return CallTarget(RUN_JOB, str(payload))


def given_settings(resolved: ResolvedConfig, config: DistributedConfig) -> dict[str, Any]:
    """Return the settings that some source set, with the config's values."""
    given = resolved.given
    return {name: getattr(config, name) for name in FIELDS if name in given}


def settings_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as variables for a trainer inside a script, whose own arguments win."""
    texts = {None: "none", True: "true", False: "false"}
    named = {f"{ENV_PREFIX}{name.upper()}": value for name, value in settings.items()}
    return {
        name: texts[value] if value is None or isinstance(value, bool) else str(value) for name, value in named.items()
    }
