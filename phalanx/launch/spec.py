"""What to launch, and the result: plain frozen data, checked before any process starts."""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.errors import UsageError, nearest

if TYPE_CHECKING:
    from phalanx.launch.failure import FailureReport
    from phalanx.launch.output import RankConsole


@dataclass(frozen=True)
class ScriptTarget:
    """Run a file the way `python path args...` does."""

    path: str | Path
    args: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse a path that is not a readable file."""
        path = Path(self.path)
        if path.is_file() and path.suffix not in ("", ".py", ".pyc"):
            raise UsageError(f"script '{self.path}' is not a .py file.", hint="Data are given with --data.")
        if path.is_file():
            return
        if path.is_dir():
            raise UsageError(f"script '{self.path}' is a directory.", hint="Give the .py file inside it.")
        siblings = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        close = nearest(path.name, siblings)
        guess = f"Did you mean '{path.parent / close}'?" if close else f"Looked in {path.parent.resolve()}."
        raise UsageError(f"script '{self.path}' does not exist.", hint=guess)


@dataclass(frozen=True)
class ModuleTarget:
    """Run a module the way `python -m name args...` does."""

    name: str
    args: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse a name that is not a module's, or of one that is not found; no module is imported for it."""
        if not all(part.isidentifier() for part in self.name.split(".")):
            raise UsageError(
                f"'{self.name}' is not a module name.",
                hint="Write it with dots, such as 'package.train'; for a file use a script.",
            )
        package, missing = find_module(self.name)
        if missing:
            inside = f"the package '{package}' has no module" if package else "there is no module"
            raise UsageError(
                f"{inside} '{missing}' (-m {self.name}).",
                hint=f"Looked in {os.getcwd()} and in the installed packages. A file is started with --script FILE.",
            )


def find_module(name: str) -> tuple[str, str]:
    """Return how much of a module's name is found, and the next part that is not: a package needs `__main__`."""
    parts: list[str] = []
    where: list[str] = [os.getcwd(), *sys.path]
    for part in name.split("."):
        full = ".".join([*parts, part])
        spec = next(filter(None, (finder.find_spec(full, where) for finder in sys.meta_path)), None)
        if spec is None:
            return ".".join(parts), part
        parts.append(part)
        where = list(spec.submodule_search_locations or ())
    return find_module(f"{name}.__main__") if where else (name, "")


@dataclass(frozen=True)
class CallTarget:
    """Import `package.module:name` in the rank and call it with `payload` (usually a path)."""

    function: str
    payload: str = ""

    def check(self) -> None:
        """Refuse a function that is not written `package.module:name`."""
        module, _, name = self.function.partition(":")
        if not module or not name.isidentifier():
            raise UsageError(f"'{self.function}' is not a function.", hint="Write it as 'package.module:name'.")


Target = ScriptTarget | ModuleTarget | CallTarget


def target_to_message(target: Target) -> dict[str, Any]:
    """Return a target as a message to the rank."""
    if isinstance(target, ScriptTarget):
        return {"script": str(target.path), "args": list(target.args)}
    if isinstance(target, ModuleTarget):
        return {"module": target.name, "args": list(target.args)}
    return {"call": target.function, "payload": target.payload}


def target_from_message(message: dict[str, Any]) -> Target:
    """Read back what `target_to_message` wrote."""
    if "script" in message:
        return ScriptTarget(message["script"], tuple(message["args"]))
    if "module" in message:
        return ModuleTarget(message["module"], tuple(message["args"]))
    return CallTarget(message["call"], message["payload"])


_EMPTY: Mapping[str, str] = MappingProxyType({})


class PlannedRanks(Protocol):
    """What a starter uses of the layout (`phalanx.world.mesh.JobLayout`)."""

    @property
    def device(self) -> str:
        """Where ranks compute: cpu or cuda."""

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""


class Starter(Protocol):
    """Another system that starts ranks: its settings, and how it runs a launch to its end."""

    def launch(self, spec: LaunchSpec, console: RankConsole) -> LaunchResult:
        """Run the target on the ranks and return when all of them have ended."""


@dataclass(frozen=True)
class Elastic:
    """How ranks that are lost are replaced in place, while the others keep their processes."""

    sizes: tuple[int, ...]
    """Numbers of ranks that the run may have, the largest first."""
    spares: int = 0
    """Ranks that are started in advance, and wait until one is lost."""
    silence_seconds: float = 10.0
    """After how many seconds a rank that is stopped is killed and replaced."""
    stall_seconds: float | None = None
    """After how many seconds a rank that all others wait for is killed and replaced; None: never."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """Everything the launcher needs to know; nothing in it needs torch."""

    target: Target
    """What every rank runs."""
    ranks_per_node: int
    """How many ranks this node runs (other nodes may run another number)."""
    log_dir: Path
    """Where rank-N.log, rank-N.error.json, rank-N.stack and the heartbeats go; made when missing."""
    num_nodes: int = 1
    """How many supervisors, one per node, form the group."""
    node_rank: int | None = None
    """This node's number among the nodes; None lets the rendezvous choose."""
    rdzv_endpoint: str = ""
    """host:port of the rendezvous; only with several nodes."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique id of this launch; the same in all of its attempts."""
    launched: float = field(default_factory=time.time)
    """When the command began that launches, in seconds since the epoch."""
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    """Added to this process's environment in every rank."""
    labels: tuple[str, ...] = ()
    """One label per global rank, such as "r3 dp1"; "r3" when not given."""
    console_ranks: str = "0"
    """The ranks whose output the console shows."""
    max_restarts: int = 0
    """How often the whole group is started again after a rank failed."""
    grace_seconds: float = 4.5
    """How long ranks may take to leave after Ctrl-C or SIGTERM before they are killed."""
    interrupt_grace: float = 0.0
    """After Ctrl-C, where that is longer: the user can press it again."""
    join_timeout: float | None = None
    """How long one rank may wait in init_process_group for the others; None: as long as torch lets it."""
    start_timeout: float | None = None
    """How long until the first rank must have reached init_process_group or finished; None: no limit."""
    stall_notice: float = 60.0
    """After how many seconds without progress a notice names the rank that the others wait for; 0: never."""
    ranks_per_gpu: int = 1
    """The most ranks on one GPU of this node; over 1 they share it over nccl (`share_gpus`)."""
    threads_per_rank: int | None = None
    """Compute threads per rank; None: this node's cores shared evenly, unless OMP_NUM_THREADS is set."""
    identity: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    """What all nodes of the run must have in common, by name: versions, settings."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Data sets that the starter itself shards over the ranks (Ray Data), by name."""
    prelude: str = ""
    """A function, `package.module:name`, that each rank calls before the target."""
    elastic: Elastic | None = None
    """Whether the target's ranks can go on after others were lost; None: all are started again."""
    starter: Starter | None = None
    """Another system, of an engine, that starts the ranks; None: this launcher's own processes."""

    def __post_init__(self) -> None:
        _at_least("ranks_per_node", self.ranks_per_node, 1)
        _at_least("num_nodes", self.num_nodes, 1)
        _at_least("max_restarts", self.max_restarts, 0)
        if self.threads_per_rank is not None:
            _at_least("threads_per_rank", self.threads_per_rank, 1)
        if self.console_ranks not in ("0", "all"):
            raise UsageError(f"console_ranks is '{self.console_ranks}'.", hint="Write '0' or 'all'.")
        if self.num_nodes > 1 and self.starter is None:
            self._check_nodes()

    def _check_nodes(self) -> None:
        if self.node_rank is not None and not 0 <= self.node_rank < self.num_nodes:
            raise UsageError(
                f"node_rank is {self.node_rank}, but there are {self.num_nodes} nodes.",
                hint=f"Give each node its own number from 0 to {self.num_nodes - 1}.",
            )
        if not self.rdzv_endpoint:
            raise UsageError(
                f"{self.num_nodes} nodes need a rendezvous, and rdzv_endpoint is empty.",
                hint="Give every node the same host:port of node 0, such as 'node0:29400'.",
            )
        split_endpoint(self.rdzv_endpoint)

    def label(self, rank: int) -> str:
        """Return what the user sees in front of this global rank's lines."""
        return self.labels[rank] if rank < len(self.labels) else f"r{rank}"


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{name} is {value}.", hint=f"It must be {least} or more.")


DEFAULT_RENDEZVOUS_PORT = 29400


def check_endpoint(endpoint: str) -> None:
    """Refuse an endpoint whose host this machine does not know, instead of trying it for minutes."""
    host, port = split_endpoint(endpoint)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"the host '{host}' of rdzv_endpoint '{endpoint}' is not known on this machine ({error.strerror}).",
            hint=f"Write the name or address of node 0 as `getent hosts` finds it here, such as '10.0.0.5:{port}'.",
        ) from error


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `host:port`, `[v6]:port` or a bare host into host and port."""
    host, separator, port = endpoint.rpartition(":")
    if not separator or endpoint.endswith("]"):
        host, port = endpoint, str(DEFAULT_RENDEZVOUS_PORT)
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"rdzv_endpoint '{endpoint}' is not host:port.", hint="Write it like 'node0:29400'.")
    return host, int(port)


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended. `failure` says what went wrong; `str(failure)` is the report to show.

    It is None after success, and when running ranks were stopped on request.
    """

    exit_code: int
    attempts: int
    failure: FailureReport | None = None
