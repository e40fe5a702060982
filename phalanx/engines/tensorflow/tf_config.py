"""TF_CONFIG, the role of a process in a TensorFlow cluster: read, checked against the settings, and written."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError

VARIABLE = "TF_CONFIG"
ROLES_VARIABLE = "PHALANX_TF_ROLES"
"""The roles of all ranks, in order, separated by commas; the launcher sets it."""

_SERVERS_UNASKED = 1
_ROLES = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True)
class Task:
    """One process of a TensorFlow cluster."""

    role: str
    index: int
    cluster: Mapping[str, list[str]]

    @property
    def leads(self) -> bool:
        """Whether this task saves, reports and prints: the chief, or the first worker where there is none."""
        return self.role == "chief" or (self.role == "worker" and self.index == 0 and not self.cluster.get("chief"))

    @property
    def serves(self) -> bool:
        """Whether this task only serves the chief of a cluster with parameter servers."""
        return bool(self.cluster.get("ps")) and self.role in ("worker", "ps")

    def to_json(self) -> str:
        """Return the value of the variable."""
        task = {"type": self.role, "index": self.index}
        return json.dumps({"cluster": {role: list(hosts) for role, hosts in self.cluster.items()}, "task": task})


def roles_of(config: DistributedConfig) -> tuple[str, ...]:
    """Return the role of each process; a mirrored run is one process, with any number of replicas."""
    strategy = config.resolved_strategy
    workers = config.total_ranks or 1
    if strategy == "mirrored":
        return ("worker",)
    if strategy == "multiworker":
        return ("worker",) * workers
    return ("chief",) + ("worker",) * workers + ("ps",) * config.num_servers


def role_names(roles: tuple[str, ...]) -> tuple[str, ...]:
    """Return a name for each process: "chief", "worker 1"."""
    return tuple(role if role == "chief" else f"{role} {roles[:n].count(role)}" for n, role in enumerate(roles))


def task_of(rank: int, roles: tuple[str, ...], addresses: list[str]) -> Task:
    """Return the task of a rank, given the addresses of all ranks."""
    cluster: dict[str, list[str]] = {}
    for role, address in zip(roles, addresses, strict=True):
        cluster.setdefault(role, []).append(address)
    return Task(roles[rank], roles[:rank].count(roles[rank]), cluster)


def read_task(environ: Mapping[str, str] | None = None) -> Task | None:
    """Return this process's task from TF_CONFIG, or None where it has none; raise where it is wrong."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise _error(f"is not JSON: {error}") from None
    if not isinstance(document, Mapping) or not document.get("cluster"):
        return None  # a single process, also for TensorFlow
    cluster, task = document["cluster"], document.get("task")
    if not isinstance(cluster, Mapping) or not isinstance(task, Mapping):
        raise _error('needs "cluster" and "task", each a table')
    return _checked(cluster, task)


def _checked(cluster: Mapping[str, Any], task: Mapping[str, Any]) -> Task:
    for name, hosts in cluster.items():
        if name not in _ROLES or not isinstance(hosts, list) or not hosts:
            raise _error(f'has "{name}": {hosts!r} in its cluster; it takes lists of hosts for {", ".join(_ROLES)}')
    if len(cluster.get("chief", ())) > 1:
        raise _error(f"has {len(cluster['chief'])} chiefs in its cluster; there can be one")
    if cluster.get("ps") and not cluster.get("chief"):
        raise _error("has ps in its cluster and no chief, without which workers and servers do nothing")
    role, index = str(task.get("type")), task.get("index")
    if role not in cluster:
        raise _error(f"names this process a {role!r}, and its cluster has only {', '.join(cluster)}")
    if not isinstance(index, int) or not 0 <= index < len(cluster[role]):
        raise _error(f"names this process {role} {index!r}, and its cluster has {len(cluster[role])} of them, from 0")
    return Task(role, index, dict(cluster))


def check_against(task: Task, config: DistributedConfig, given: Collection[str] = ()) -> None:
    """Raise for a cluster that contradicts the settings of the run; `given`: the settings that were set."""
    workers = len(task.cluster.get("worker", ()))
    servers = len(task.cluster.get("ps", ()))
    if config.strategy == "parameter-server" and not servers:
        raise _error("has no ps in its cluster, but strategy = 'parameter-server' was given")
    if config.strategy in ("mirrored", "multiworker") and servers:
        raise _error(f"has {servers} ps in its cluster, but strategy = {config.strategy!r} was given")
    if config.strategy == "mirrored" and sum(map(len, task.cluster.values())) > 1:
        raise _error("names a cluster of several processes, but strategy = 'mirrored' is one process")
    # Without parameter servers the chief trains like the workers; with them it only coordinates.
    trains = workers if servers else workers + len(task.cluster.get("chief", ()))
    if config.total_ranks is not None and config.total_ranks != trains:
        raise _error(f"has {trains} worker{'s' * (trains != 1)}, but num_workers = {config.total_ranks} was given")
    asked = "num_servers" in given or config.num_servers != _SERVERS_UNASKED
    if servers and asked and config.num_servers != servers:
        raise _error(f"has {servers} ps, but num_servers = {config.num_servers} was given")


def _error(what: str) -> UsageError:
    return UsageError(
        f"the environment variable {VARIABLE} {what}",
        hint="The program that started this process set it (Kubeflow, a scheduler, a shell). Make it agree with the "
        f"settings, leave the settings out, or unset {VARIABLE}: phalanx then starts the processes and writes it.",
    )
