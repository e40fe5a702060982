"""Start a local Ray whose workers are forked from a process that has already imported torch."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from phalanx.engines.ray import fork_client
from phalanx.host.processes import own_python
from phalanx.launch.forkserver.preload import SINGLE_THREADED


@contextmanager
def process_guard(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, and unset them afterwards."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM: Ray's ends the process silently."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


TRIED = ("2.60.",)
"""Versions of Ray whose private parts were tested with `_node`."""
_LONGEST_TEMP = 24
"""The paths of Ray's sockets are some 80 characters longer than this folder's, and must stay below 108."""
_RAYS_FOLDER = "r"
_ADDRESS = "127.0.0.1"
_SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray lowers the priority of its workers, but here nothing else runs
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_enable_timeline": "0",
    "RAY_task_events_report_interval_ms": "0",
}
"""Read by Ray's C++ processes."""

_NO_JOB = {"RAY_JOB_ID": "ffffffff"}
"""What Ray's library reads when the fork server imports it: workers learn their job with their first task. It also
reads RAY_RAYLET_PID, the process whose end ends the workers: this one."""


@contextmanager
def local_ray(num_cpus: float | None, num_gpus: int | None) -> Iterator[None]:
    """Start a Ray for this process and connect to it; end it with the block."""
    usual = tempfile.gettempdir()
    short = usual if len(usual) <= _LONGEST_TEMP or not os.path.isdir("/tmp") else "/tmp"
    # Only this user can read this folder. Ray makes its own folder readable to everyone, so it gets one inside.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=short))
    rays = folder / _RAYS_FOLDER
    resources = {"num_cpus": None if num_cpus is None else int(max(1, -(-num_cpus // 1))), "num_gpus": num_gpus}
    # Ray requires a token for a cluster that it starts; with one in the environment it writes none to a file.
    settings = {**_SETTINGS, "RAY_AUTH_TOKEN": _token(), "RAY_AUTH_MODE": "token"}
    try:
        with process_guard(settings):
            if version("ray").startswith(TRIED):
                with _warm(folder), _node(rays, resources) as address:  # imports while Ray's own processes start
                    _init(address)
                    yield
            else:
                _init("local", **resources, include_dashboard=False, _temp_dir=str(rays))
                yield
    finally:
        import_module("ray").shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _init(address: str, **more: Any) -> None:
    ray: Any = import_module("ray")
    with own_sigterm():
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, _node_ip_address=_ADDRESS, **more)


@contextmanager
def _warm(folder: Path) -> Iterator[None]:
    """Run the fork server, with the address of its socket in the environment."""
    address = str(folder / "warm")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        with (folder / "warm.log").open("wb") as log:
            process = subprocess.Popen(
                own_python(
                    "from phalanx.engines.ray.forkserver import main; main()", listener.fileno(), os.getpid(), folder
                ),
                env={**os.environ, **SINGLE_THREADED, **_NO_JOB, "RAY_RAYLET_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal is for the launcher alone
            )
    os.environ[fork_client.WARM] = address  # a worker of another Ray may have started this process with its own
    try:
        yield
    finally:
        os.environ.pop(fork_client.WARM, None)
        process.kill()
        process.wait()


@contextmanager
def _node(folder: Path, resources: dict[str, int | None]) -> Iterator[str]:
    """Run Ray's head node; yields its address."""
    node: Any = import_module("ray._private.node")
    parameter: Any = import_module("ray._private.parameter")

    class Quiet(node.Node):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            try:
                super().__init__(*arguments, **named)
            except BaseException:  # Ctrl-C: what has started would run for as long as this process does
                if hasattr(self, "all_processes"):
                    self.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
                raise

        def start_api_server(self, **_: Any) -> None:
            """Start none: it serves the dashboard, and takes seconds to report that there is none."""

    import_module("ray._raylet").Config.initialize("")  # reads the token's mode from the environment, again
    script = os.path.abspath(fork_client.__file__)
    asked = parameter.RayParams(
        **resources,
        node_ip_address=_ADDRESS,
        temp_dir=str(folder),
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        worker_path=script,
        setup_worker_path=script,
    )
    running = Quiet(asked, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
    # With a known node `ray.init` uses 127.0.0.1; else it takes the machine's outer address, where nothing listens.
    worker: Any = import_module("ray._private.worker")
    worker._global_node = running
    try:
        yield running.address
    finally:
        import_module("ray").shutdown()
        running.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)


@functools.cache
def _token() -> str:
    """Return this process's token: Ray reads it once, so that a second local Ray must use the same."""
    return os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
