"""Connect to a Ray cluster, or start a local one that ends with the run.

An address is checked within seconds, before Ray sees it: Ray itself would retry for minutes.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.host.processes import send_signal

_BUSY_HEAD = "Starting Ray client server failed"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The launcher reports it with the rank and its log; Ray would print paragraphs between the lines of the run.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^A worker died or was killed while executing",
}
_LOCAL = {
    "RAY_worker_niceness": "0",  # Ray lowers the priority of its workers, but here nothing else runs
    "RAY_prestart_worker_first_driver": "0",  # those of a run have their own variables: none could be used
    "RAY_enable_metrics_collection": "0",
}
"""Settings of a Ray that is started for one run."""
_END_SECONDS = 5.0
"""How long killed processes may take to end."""
_LONGEST_TEMP = 24
"""The paths of Ray's sockets are some 80 characters longer than this folder's, and must stay below 108."""


@dataclass(frozen=True)
class RayCluster:
    """A Ray that this process is connected to."""

    name: str
    """Its name in messages: "the local Ray", "the Ray cluster at head:6379"."""
    started_here: bool = False

    def nodes(self) -> list[dict[str, float]]:
        """Return the total resources of each live node, used or not."""
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
    notice: Callable[[str], None] = lambda text: None,
) -> Iterator[RayCluster]:
    """Connect to the Ray at `address`, else to the one of RAY_ADDRESS, else start a local one; clean up afterwards.

    `address` is ray://host:port (Ray's client), host:port or "auto" (this machine is part of the cluster). A Ray that
    this process has initialised already is used as it is, and left alone.
    """
    with _environment(_QUIET):
        if "ray" in sys.modules and sys.modules["ray"].is_initialized():
            yield RayCluster("the Ray that this process has joined")
            return
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is None:
            notice("starting a local Ray")
            with _local_ray(num_cpus):
                yield RayCluster("the local Ray", started_here=True)
            return
        if address == "auto":  # a job of the cluster has its address in the environment
            address = os.environ.get("RAY_ADDRESS") or started_on_this_machine()
        check_address(address)
        notice(f"connecting to Ray at {address}")
        _join(address, notice)
        try:
            yield RayCluster(f"the Ray cluster at {address}")
        finally:
            import_module("ray").shutdown()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set; afterwards unset them, and those that Ray itself has set."""
    before = set(os.environ)
    os.environ.update({name: value for name, value in variables.items() if name not in before})
    try:
        yield
    finally:
        for name in {name for name in os.environ if name in variables or name.startswith("RAY_")} - before:
            del os.environ[name]


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM: Ray's ends the process silently."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _local_ray(num_cpus: float | None) -> Iterator[None]:
    """Start a Ray for this process and connect to it; end it with the block."""
    ray: Any = import_module("ray")
    usual = tempfile.gettempdir()
    short = usual if len(usual) <= _LONGEST_TEMP or not os.path.isdir("/tmp") else "/tmp"
    # Only this user can read this folder. Ray makes its own folder readable to everyone, so it gets one inside.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=short))
    # Ray requires a token for a cluster that it starts; with one in the environment it writes none to a file.
    with _environment({"RAY_AUTH_TOKEN": _token(), **_LOCAL}):
        try:
            _start(num_cpus, folder)
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _start(num_cpus: float | None, folder: Path) -> None:
    """Start Ray; a second time where its processes took longer than Ray's fixed limit of 30 s, as on a busy machine."""
    ray: Any = import_module("ray")
    for session in ("r", "s"):  # one letter: paths of sockets are short
        try:
            with _own_sigterm():
                ray.init(
                    "local",
                    num_cpus=None if num_cpus is None else int(max(1, -(-num_cpus // 1))),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder / session),
                )
        except Exception as error:  # Ray has no class for processes that take too long
            ray.shutdown()
            _end_processes(str(folder / session))
            if session == "s" or "timed out during startup" not in str(error):
                raise UsageError(
                    f"a local Ray could not be started: {str(error).strip()}",
                    hint="Is the machine busy? --backend pytorch-ddp (for a search: --engine local) needs no Ray.",
                ) from error
        else:
            return


def _end_processes(folder: str) -> None:
    """End the processes of a Ray that did not start, which have its folder, no other's, in their arguments.

    Ray itself ends them with this process only: beside a second Ray they would take the time that the first one lacked.
    """
    deadline = time.monotonic() + _END_SECONDS
    while (pids := _processes_with(folder)) and time.monotonic() < deadline:
        for pid in pids:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes_with(argument: str) -> list[int]:
    """Return the processes that have a text in their arguments."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if argument in path.read_text(errors="replace"):
                pids.append(int(path.parent.name))
    return pids


@functools.cache
def _token() -> str:
    """Return this process's token: Ray reads it once, so that a second local Ray must use the same."""
    return os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)


def _join(address: str, notice: Callable[[str], None]) -> None:
    """Connect; retry once where the head was too slow to start a server for this client."""
    import ray

    for tries_left in (1, 0):
        try:
            with _own_sigterm():
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
            hint="Ray needs the same Ray and the same Python (x.y) on every node and where the run is started.",
        )
    return UsageError(f"the Ray cluster at {address} could not be joined: {text}")


def check_resources(
    cluster: RayCluster, needed: Mapping[str, float], count: int = 1, *, placement: str = "pack", noun: str = "workers"
) -> int:
    """Return how many workers fit when idle; refuse fewer than `count`, for which Ray would wait for ever.

    Each of `count` workers needs `needed` on one node.
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
        return fits
    names = {name for node in nodes for name in node if ":" not in name}  # without Ray's internal entries
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in names - {"memory", "object_store_memory"}}
    have = "together " + resources_text(total) if total else "none with CPUs or GPUs to give"
    one_by_one = f" ({placement})" if placement.startswith("strict") else ""
    raise UsageError(
        f"{count} {noun} with {resources_text(needed)} each{one_by_one} do not fit on {cluster.name}, which has room "
        f"for {fits}: {len(nodes)} node{'s' * (len(nodes) != 1)}, {have}.",
        hint="Request fewer or smaller workers, or add nodes; where an autoscaler adds them, set how long to wait "
        "with start_timeout (--start-timeout 600).",
    )


def resources_text(resources: Mapping[str, float]) -> str:
    """Write resources as text: "1 CPU and 1 GPU"."""
    words = [f"{amount:g} {name}" for name, amount in sorted(resources.items()) if amount]
    return " and ".join(words) or "nothing reserved"


_SCHEME = "ray://"
PROBE_SECONDS = 5.0
"""How long an address may take to answer at all."""
_CLIENT_PORT = 10001
_SETTINGS_FRAME = b"\x04"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS_FRAME + b"\0" + b"\0\0\0\0"
_CLIENT = ("Ray's client server", "/ray.rpc.RayletDriver/ClusterInfo")
_HEAD = ("the head of a Ray cluster", "/ray.rpc.NodeInfoGcsService/GetClusterId")
"""What listens at each kind of address, and a method that it has."""


def check_address(address: str) -> None:
    """Refuse an address that is malformed or where no Ray listens."""
    if address in ("auto", "local"):
        return
    rest = address.removeprefix(_SCHEME)
    if "://" in rest:
        scheme = rest.split("://")[0]
        raise UsageError(
            f"address '{address}' begins with '{scheme}://', which Ray does not support.",
            hint="Write ray://head:10001 (Ray's client), head:6379 (from a node of the cluster) or auto.",
        )
    host, separator, port = rest.rpartition(":")
    if not separator and address.startswith(_SCHEME):
        host, port = rest, str(_CLIENT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"address '{address}' is not host:port.", hint="Write it like ray://head:10001 or head:6379.")
    _probe(address, host.strip("[]"), int(port))


def started_on_this_machine() -> str:
    """Return the address of the Ray that `ray start` started here last, not that of a Ray for a single run."""
    temp = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(temp, "ray/ray_current_cluster")
    if not file.exists():
        raise UsageError(
            "address 'auto': `ray start` has started no Ray on this machine, or `ray stop` ended it",
            hint="Start one with `ray start --head`, or leave address out for a local Ray.",
        )
    return file.read_text().strip()


def _probe(address: str, host: str, port: int) -> None:
    """Check that a server listens, answers as gRPC does, and has a method of Ray."""
    encrypted = os.environ.get("RAY_USE_TLS") == "1"  # then Ray alone has the certificates to ask with
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS) as connection:
            speaks = encrypted or _speaks_grpc(connection)
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        raise _no_ray(
            address, f"a connection to {host} port {port} was tried for up to {PROBE_SECONDS:g} s: {why}"
        ) from error
    if not speaks:
        raise _no_ray(address, f"what listens at {host} port {port} did not answer as Ray does in {PROBE_SECONDS:g} s")
    if not encrypted and find_spec("grpc") is not None:
        _ask(address, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _ask(address: str, target: str) -> None:
    """Call a method that only Ray has; any answer but "no such method" comes from Ray."""
    grpc: Any = import_module("grpc")  # carries no types
    server, method = _CLIENT if address.startswith(_SCHEME) else _HEAD
    directly = [("grpc.enable_http_proxy", 0)]  # as Ray itself connects
    with grpc.insecure_channel(target, options=directly) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=PROBE_SECONDS)
        except grpc.RpcError as error:
            but = {
                grpc.StatusCode.UNIMPLEMENTED: f"is not {server}",
                grpc.StatusCode.DEADLINE_EXCEEDED: f"did not give {server}'s answer within {PROBE_SECONDS:g} s",
                grpc.StatusCode.UNAVAILABLE: f"closed the connection when it was asked for {server}'s answer",
            }
            if error.code() in but:
                raise _no_ray(address, f"what listens there speaks gRPC, but {but[error.code()]}") from error


def _speaks_grpc(connection: socket.socket) -> bool:
    """Send the HTTP/2 preface; whether a settings frame comes back, as from any gRPC server."""
    connection.sendall(_HTTP2_GREETING)
    answer = b""
    try:
        while len(answer) < 4 and (more := connection.recv(9)):
            answer += more
    except TimeoutError:
        return False
    return answer[3:4] == _SETTINGS_FRAME


def _no_ray(address: str, tried: str) -> UsageError:
    return UsageError(
        f"no Ray answers at {address} ({tried}).",
        hint="On the head node, `ray status` says whether Ray runs; ray:// is port 10001 of the head, host:port is "
        "6379 unless `ray start --port` said otherwise. Leave address out for a local Ray.",
    )
