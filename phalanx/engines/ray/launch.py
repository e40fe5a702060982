"""Ranks on Ray's workers: Ray Train places and restarts them, and the launcher here shows what they do.

1. `ray_cluster` connects to a cluster or starts a local one.
2. A `Controller` (an actor on the head node) runs Ray Train's controller, so that nothing of it depends on whether this
   process is part of the cluster or a client of it.
3. Each worker (`ray_worker`) unpacks what travelled (`luggage`), becomes a rank and runs the target.
4. Output, events and error records come back as messages; `ray_follow` shows them and reports what failed.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.config.engine_rules import settings_of_start
from phalanx.engines.ray.cluster import Cluster, check_resources, open_cluster, resources_text
from phalanx.engines.ray.follow import RayFollower
from phalanx.engines.ray.sources import pack
from phalanx.errors import UsageError
from phalanx.host.signals import SignalInbox
from phalanx.launch.output import RankConsole
from phalanx.launch.spec import LaunchResult, LaunchSpec, PlannedRanks

_HEAD = {"node:__internal_head__": 0.001}
"""A resource that only the head node has."""
_TRAVELLING = ("PHALANX_", "NCCL_", "TORCH_", "GLOO_", "MLFLOW_", "HF_", "CUDA_LAUNCH_BLOCKING")
"""Prefixes of this process's variables that ranks on other machines get as well."""
_FASTER = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # the controller handles reports only at its next check
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
_SOONER_FEWER = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}
"""After the loss of a machine Ray first asks for as many workers as before, and for fewer only when that failed."""
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
        with ExitStack() as held:
            try:
                cluster = held.enter_context(open_cluster(self.address, num_cpus=num_cpus, notice=console.notice))
                if self.start_timeout is None:  # else more machines may come
                    check_resources(cluster, self.resources, self.min_workers or self.workers, placement=self.placement)
                connected = time.monotonic()
                console.notice(f"{cluster.name}: ready after {connected - began:.1f} s; {self._request()}")
                run = held.enter_context(_Run(self, spec, cluster, console))
            except KeyboardInterrupt:
                console.notice("SIGINT: stopped while Ray was starting; no rank had started")
                raise
            with SignalInbox() as inbox:
                return RayFollower(spec, console, inbox, run, self, connected).follow()

    def _request(self) -> str:
        count = f"{self.min_workers} to {self.workers}" if self.min_workers else str(self.workers)
        return f"asking for {count} worker{'s' * (self.workers > 1)} with {resources_text(self.resources)} each"

    @property
    def variables(self) -> dict[str, str]:
        """Settings of Ray Train that shorten its start and its reports; those of the environment take precedence."""
        ours = _FASTER if self.min_workers is None else {**_FASTER, **_SOONER_FEWER}
        return {name: os.environ.get(name, value) for name, value in ours.items()}


def starter(config: DistributedConfig, layout: PlannedRanks) -> RayStarter:
    """Return the starter for a config."""
    resources = {"CPU": config.cpus_per_worker, **({"GPU": 1.0} if layout.device == "cuda" else {})}
    resources |= read_resources(config.resources_per_worker)
    return RayStarter(
        config.address, layout.world_size, config.min_workers, resources, config.placement, config.start_timeout
    )


def read_resources(text: str | None) -> dict[str, float]:
    """Read 'GPU=0.5,big_memory=1'."""
    found: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in (text or "").split(","))):
        name, separator, amount = part.partition("=")
        try:
            value = float(amount)
        except ValueError:
            value = -1.0
        if not separator or not name.strip() or value < 0:
            raise UsageError(
                f"resources_per_worker = {text!r}: '{part}' is not name=amount.",
                hint="Write it like 'GPU=0.5,big_memory=1'.",
            )
        found[name.strip()] = value
    return found


class _Run:
    """The conductor of one launch, and the result of its run."""

    def __init__(self, starter: RayStarter, spec: LaunchSpec, cluster: Cluster, console: RankConsole) -> None:
        self._starter = starter
        self._spec = spec
        self._console = console
        self._beacon = spec.log_dir.absolute() / f".launch-{secrets.token_hex(8)}"
        self.cluster = cluster
        self.conductor: Any = None
        self.result: Any = None

    def __enter__(self) -> _Run:
        import ray

        from phalanx.engines.ray.controller import Controller
        from phalanx.engines.ray.worker import RankOrder

        # DEFAULT: not in the placement group of a Tune trial that this process may belong to.
        actor = ray.remote(Controller).options(num_cpus=0, resources=_HEAD, scheduling_strategy="DEFAULT")
        variables = self._starter.variables
        if self.cluster.started_here:  # its one machine is not preempted
            variables.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # an actor less to start
        self.conductor = actor.remote(variables)
        self._beacon.touch()
        luggage = pack(self._spec.target, self._console.notice, self._beacon)
        order = RankOrder(luggage, self._environment(), self._threads(), self._max_failures())
        self.result = self.conductor.run.remote(self._arrangement(), order, dict(self._spec.data))
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        self._beacon.unlink(missing_ok=True)
        ray.kill(self.conductor)

    def _arrangement(self) -> Any:
        from phalanx.engines.ray.controller import RayRunSpec

        starter = self._starter
        least = starter.min_workers
        folder = self._spec.log_dir.absolute()
        folder = folder.parent if folder.name == "logs" else folder  # the run folder, with the checkpoints
        return RayRunSpec(
            workers=starter.workers if least is None else (least, starter.workers),
            resources=starter.resources,
            use_gpu=starter.resources.get("GPU", 0) > 0,
            placement=starter.placement.upper().replace("-", "_"),
            max_failures=self._max_failures(),
            storage=str(folder.parent),
            name=folder.name,
            own_ray=self.cluster.started_here,
        )

    def _max_failures(self) -> int:
        return self._spec.max_restarts or (_ELASTIC_FAILURES if self._starter.min_workers is not None else 0)

    def _environment(self) -> dict[str, str]:
        """Return the variables of this process that ranks get on every machine."""
        own = {name: value for name, value in os.environ.items() if name.startswith(_TRAVELLING)}
        done = {f"PHALANX_{name.upper()}" for name in settings_of_start("ray")}
        launch = {"PHALANX_RUN_ID": self._spec.run_id}
        return {name: value for name, value in {**own, **self._spec.env, **launch}.items() if name not in done}

    def _threads(self) -> int | None:
        """Return the compute threads per rank; None on a local Ray: the machine's cores shared evenly.

        On a cluster, where other jobs may share the machine, a rank uses the CPUs that were reserved for it.
        """
        if self._spec.threads_per_rank is not None:
            return self._spec.threads_per_rank
        exported = os.environ.get("OMP_NUM_THREADS", "")
        if exported.isdecimal() and int(exported) > 0:
            return int(exported)
        return None if self.cluster.started_here else max(1, int(self._starter.resources.get("CPU", 1)))
