"""Connect to a Ray cluster, or start a local one that ends with the run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from phalanx.engines.ray.address import SCHEME, check_address, started_on_this_machine
from phalanx.engines.ray.local import local_ray, own_sigterm, process_guard
from phalanx.errors import UsageError

_BUSY_HEAD = "Starting Ray client server failed"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The launcher reports it with the rank and its log; Ray would print paragraphs between the lines of the run.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^A worker died or was killed while executing",
}


@dataclass(frozen=True)
class RayCluster:
    """A Ray that this process is connected to."""

    name: str
    """Its name in messages: "the local Ray", "the Ray cluster at head:6379"."""
    started_here: bool = False
    is_client: bool = False
    """Reached through ray://: this process is not a node of the cluster."""

    def nodes(self) -> list[dict[str, float]]:
        """Return the total resources of each live machine, used or not."""
        ray: Any = import_module("ray")  # some of its functions carry no types
        return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]

    def free(self) -> dict[str, float]:
        """Return the resources that are free at the moment."""
        ray: Any = import_module("ray")
        return dict(ray.available_resources())


@contextmanager
def open_cluster(
    address: str | None = None,
    *,
    num_cpus: float | None = None,
    num_gpus: int | None = None,
    notice: Callable[[str], None] = lambda text: None,
) -> Iterator[RayCluster]:
    """Connect to the Ray at `address`, else to the one of RAY_ADDRESS, else start a local one; clean up afterwards.

    `address` is ray://host:port (Ray's client), host:port or "auto" (this machine is part of the cluster). A Ray that
    this process has initialised already is used as it is, and left alone.
    """
    with process_guard(_QUIET):
        if "ray" in sys.modules and sys.modules["ray"].is_initialized():
            client: Any = import_module("ray.util.client").ray
            yield RayCluster("the Ray that this process has joined", is_client=bool(client.is_connected()))
            return
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is None:
            notice("starting a local Ray")
            with local_ray(num_cpus, num_gpus):
                yield RayCluster("the local Ray", started_here=True)
            return
        if address == "auto":  # a job of the cluster has its address in the environment
            address = os.environ.get("RAY_ADDRESS") or started_on_this_machine()
        check_address(address)
        notice(f"connecting to Ray at {address}")
        _join(address, notice)
        try:
            yield RayCluster(f"the Ray cluster at {address}", is_client=address.startswith(SCHEME))
        finally:
            import_module("ray").shutdown()


def _join(address: str, notice: Callable[[str], None]) -> None:
    """Connect; retry once where the head was too slow to start a server for this client."""
    import ray

    for tries_left in (1, 0):
        try:
            with own_sigterm():
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            if not tries_left or _BUSY_HEAD not in str(error):
                raise _refused(address, error) from error
            notice(f"the head at {address} could not start a server for this client in time: trying again")
        else:
            return


def _refused(address: str, error: Exception) -> UsageError:
    text = str(error).strip()
    if "ersion mismatch" in text:
        import ray

        here = f"Ray {ray.__version__} and Python {'.'.join(map(str, sys.version_info[:3]))}"
        return UsageError(
            f"the Ray cluster at {address} runs other versions than this environment, which has {here}: {text}",
            hint="Ray needs the same Ray and the same Python (x.y) on every machine and where the run is started.",
        )
    return UsageError(f"the Ray cluster at {address} could not be joined: {text}")


def check_resources(
    cluster: RayCluster, needed: Mapping[str, float], count: int = 1, *, placement: str = "pack", what: str = "workers"
) -> None:
    """Refuse workers that the cluster's machines could never hold, even idle: Ray would wait for ever.

    Each of `count` workers needs `needed` on one machine.
    """
    nodes = cluster.nodes()
    room = [
        min(
            (int(node.get(name, 0.0) / amount + 1e-9) for name, amount in needed.items() if amount), default=sys.maxsize
        )
        for node in nodes
    ]
    if placement == "strict-spread":
        room = [min(1, places) for places in room]
    fits = max(room, default=0) if placement == "strict-pack" else sum(room)
    if fits >= count:
        return
    names = {name for node in nodes for name in node if ":" not in name}  # without Ray's internal entries
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in names - {"memory", "object_store_memory"}}
    have = "together " + resources_text(total) if total else "none with CPUs or GPUs to give"
    one_by_one = f" ({placement})" if placement.startswith("strict") else ""
    raise UsageError(
        f"{count} {what} with {resources_text(needed)} each{one_by_one} do not fit on {cluster.name}, which has room "
        f"for {fits}: {len(nodes)} machine{'s' * (len(nodes) != 1)}, {have}.",
        hint="Request fewer or smaller workers, or add machines; where an autoscaler adds them, set how long to wait "
        "with start_timeout (--start-timeout 600).",
    )


def resources_text(resources: Mapping[str, float]) -> str:
    """Write resources as text: "1 CPU and 1 GPU"."""
    words = [f"{amount:g} {name}" for name, amount in sorted(resources.items()) if amount]
    return " and ".join(words) or "nothing reserved"
