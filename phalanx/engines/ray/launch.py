"""Ranks on Ray's workers: Ray Train places and restarts them, and the launcher here shows what they do.

1. `cluster` connects to a cluster or starts a local one.
2. A `Controller` (an actor on the head node) runs Ray Train's controller, so that it does not matter whether this
   process is part of the cluster or a client of it.
3. Each worker (`worker`) unpacks the code that was sent (`sources`), becomes a rank and runs the target.
4. Output, events and error records come back as messages; `follow` shows them and reports what failed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.config.option import options_of
from phalanx.config.settings import ENV_PREFIX
from phalanx.engines.ray.cluster import RayCluster, check_resources, open_cluster, resources_text
from phalanx.engines.ray.controller import Controller
from phalanx.engines.ray.declaration import RaySettings
from phalanx.engines.ray.fit_order import RankOrder, RayRunSpec
from phalanx.engines.ray.follow import RayFollower, RayRun
from phalanx.engines.ray.rules import read_resources
from phalanx.engines.ray.sources import pack
from phalanx.host.processes import SignalInbox
from phalanx.launch.output import RankConsole
from phalanx.launch.spec import LaunchResult, LaunchSpec, PlannedRanks

_HEAD = {"node:__internal_head__": 0.001}
"""A resource that only the head node has."""
_FORWARDED = ("PHALANX_", "NCCL_", "TORCH_", "GLOO_", "MLFLOW_", "HF_", "CUDA_LAUNCH_BLOCKING")
"""Prefixes of this process's variables that ranks on other nodes get as well."""
_FASTER = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # the controller handles reports only at its next check
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
_ELASTIC_FASTER = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}
"""After the loss of a node Ray first requests as many workers as before, and fewer only when that failed."""
_LOCAL_FASTER = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""The one node of a local Ray is not preempted: one actor less to start."""
_ELASTIC_FAILURES = 3
"""How many losses an elastic run survives by default."""


@dataclass(frozen=True)
class RayStarter:
    """The settings of Ray."""

    address: str | None
    workers: int
    min_workers: int | None
    resources: dict[str, float]
    placement: str
    start_timeout: float | None

    def launch(self, spec: LaunchSpec, console: RankConsole) -> LaunchResult:
        """Run the target on Ray's workers and return when all of them have ended."""
        began = time.monotonic()
        num_cpus = max(os.cpu_count() or 1, self.workers * self.resources.get("CPU", 1))
        with ExitStack() as stack:
            try:
                cluster = stack.enter_context(open_cluster(self.address, num_cpus=num_cpus, notice=console.notice))
                if self.start_timeout is None:  # else more nodes may come
                    check_resources(cluster, self.resources, self.min_workers or self.workers, placement=self.placement)
                count = f"{self.min_workers} to {self.workers}" if self.min_workers else str(self.workers)
                console.notice(
                    f"{cluster.name}: ready after {time.monotonic() - began:.1f} s; asking for {count} "
                    f"worker{'s' * (self.workers > 1)} with {resources_text(self.resources)} each"
                )
                run = stack.enter_context(self._started(spec, cluster, console))
            except KeyboardInterrupt:
                console.notice("SIGINT: stopped while Ray was starting; no rank had started")
                raise
            with SignalInbox() as inbox:
                return RayFollower(spec, console, inbox, run).follow()

    @contextmanager
    def _started(self, spec: LaunchSpec, cluster: RayCluster, console: RankConsole) -> Iterator[RayRun]:
        """Start the controller actor and the run on it."""
        import ray

        began = time.monotonic()
        # DEFAULT: not in the placement group of a Tune trial that this process may belong to.
        actor = ray.remote(Controller).options(num_cpus=0, resources=_HEAD, scheduling_strategy="DEFAULT")
        controller: Any = actor.remote(self._variables(cluster))
        marker = spec.log_dir.absolute() / f".launch-{secrets.token_hex(8)}"
        marker.touch()
        try:
            run_spec = self._run_spec(spec, cluster)
            archive = pack(spec.target, console.notice, marker)
            order = RankOrder(archive, _environment(spec), self._threads(spec, cluster), run_spec.max_failures)
            result = controller.run.remote(run_spec, order, dict(spec.data))
            yield RayRun(cluster, controller, result, self.workers, self.resources, self.start_timeout, began)
        finally:
            marker.unlink(missing_ok=True)
            ray.kill(controller)

    def _variables(self, cluster: RayCluster) -> dict[str, str]:
        """Return settings that shorten Ray Train's start and reports; those of the environment take precedence."""
        elastic = {} if self.min_workers is None else _ELASTIC_FASTER
        variables = {name: os.environ.get(name, value) for name, value in {**_FASTER, **elastic}.items()}
        return {**_LOCAL_FASTER, **variables} if cluster.started_here else variables

    def _run_spec(self, spec: LaunchSpec, cluster: RayCluster) -> RayRunSpec:
        least = self.min_workers
        folder = spec.log_dir.absolute()
        folder = folder.parent if folder.name == "logs" else folder  # the run folder, with the checkpoints
        return RayRunSpec(
            workers=self.workers if least is None else (least, self.workers),
            resources=self.resources,
            use_gpu=self.resources.get("GPU", 0) > 0,
            placement=self.placement.upper().replace("-", "_"),
            max_failures=spec.max_restarts or (0 if least is None else _ELASTIC_FAILURES),
            storage=str(folder.parent),
            name=folder.name,
            own_ray=cluster.started_here,
        )

    def _threads(self, spec: LaunchSpec, cluster: RayCluster) -> int | None:
        """Return the compute threads per rank; None on a local Ray: the machine's cores shared evenly.

        On a cluster, where other jobs may share the node, a rank uses the CPUs that were reserved for it.
        """
        if spec.threads_per_rank is not None:
            return spec.threads_per_rank
        exported = os.environ.get("OMP_NUM_THREADS", "")
        if exported.isdecimal() and int(exported) > 0:
            return int(exported)
        return None if cluster.started_here else max(1, int(self.resources.get("CPU", 1)))


def _environment(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables that ranks get on every node."""
    forwarded = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
    every = {**forwarded, **spec.env, "PHALANX_RUN_ID": spec.run_id}
    of_start = {ENV_PREFIX + name.upper() for name in RaySettings.__dataclass_fields__}
    return {name: value for name, value in every.items() if name not in of_start}  # ranks need nothing of these


def starter(config: DistributedConfig, layout: PlannedRanks) -> RayStarter:
    """Return the starter for a config."""
    options = options_of(RaySettings, config)
    resources = {"CPU": options.cpus_per_worker, **({"GPU": 1.0} if layout.device == "cuda" else {})}
    resources |= read_resources(options.resources_per_worker)
    return RayStarter(
        options.address,
        layout.world_size,
        config.min_workers,
        resources,
        options.placement,
        config.start_timeout,
    )
