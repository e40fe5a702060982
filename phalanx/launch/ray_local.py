"""A Ray for one machine and one run, with only the processes that a run needs.

It binds to 127.0.0.1, starts no dashboard, no autoscaler and no log reader, sends no usage figures, asks for a token
that only this process and its workers know (in the environment, not in a file at home), and has its workers forked
from a warm process (`ray_warm`). For the last three Ray's own parts are put together here, which is done only in
versions of Ray that were tried; any other starts as `ray.init` does it.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.host.processes import own_python
from phalanx.launch import ray_ask
from phalanx.launch.preload import SINGLE_THREADED
from phalanx.launch.ray_surroundings import own_sigterm, surroundings

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIED = ("2.60.",)
"""Versions of Ray whose parts are known to fit together as `_start_node` does it."""
_LONGEST_TEMP = 24
"""Ray's sockets lie some 80 characters deeper, and their paths must stay below 108."""
_RAYS_FOLDER = "r"
_ADDRESS = "127.0.0.1"
_SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray's workers step back behind everything else, but here nothing else matters
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_enable_timeline": "0",
    "RAY_task_events_report_interval_ms": "0",
}
"""Read by Ray's C++ processes."""

_NO_JOB = {"RAY_JOB_ID": "ffffffff"}
"""What Ray's library reads when the warm process loads it: the worker learns its job with its first task, as those do
that wait for one. It also asks whose death ends the workers: ours."""


@contextmanager
def local_ray(num_cpus: float | None, num_gpus: int | None) -> Iterator[None]:
    """Have a Ray of one's own, and be connected to it."""
    # Nobody else can look into this folder. Ray opens the one that it is given to everybody, so it gets one inside.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=_short_temp()))
    rays = folder / _RAYS_FOLDER
    resources = {"num_cpus": None if num_cpus is None else int(max(1, -(-num_cpus // 1))), "num_gpus": num_gpus}
    # Ray itself turns tokens on for a cluster that it starts; with one in the environment it writes none to a file.
    settings = {**_SETTINGS, "RAY_AUTH_TOKEN": _token(), "RAY_AUTH_MODE": "token"}
    try:
        with surroundings(settings):
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
    """Have the warm process, and its socket in the environment."""
    address = str(folder / "warm")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        with (folder / "warm.log").open("wb") as log:
            process = subprocess.Popen(
                own_python("from phalanx.launch.ray_warm import main; main()", listener.fileno(), os.getpid(), folder),
                env={**os.environ, **SINGLE_THREADED, **_NO_JOB, "RAY_RAYLET_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal is for the launcher alone
            )
    os.environ[ray_ask.WARM] = address  # whatever was there: a worker of another Ray may have started us
    try:
        yield
    finally:
        os.environ.pop(ray_ask.WARM, None)
        process.kill()
        process.wait()


@contextmanager
def _node(folder: Path, resources: dict[str, int | None]) -> Iterator[str]:
    """Have Ray's head node, and tell its address."""
    node: Any = import_module("ray._private.node")
    parameter: Any = import_module("ray._private.parameter")

    class Quiet(node.Node):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            try:
                super().__init__(*arguments, **named)
            except BaseException:  # Ctrl-C: what has started would stay for as long as this process does
                if hasattr(self, "all_processes"):
                    self.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
                raise

        def start_api_server(self, **_: Any) -> None:
            """Start none: it serves the dashboard, and takes seconds to say that there is none."""

    import_module("ray._raylet").Config.initialize("")  # reads the token's mode from the environment, again
    script = os.path.abspath(ray_ask.__file__)
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
    # Whose node is known keeps 127.0.0.1; else Ray takes the machine's outer address for it, where nobody listens.
    worker: Any = import_module("ray._private.worker")
    worker._global_node = running  # `ray.init` puts its own in this place
    try:
        yield running.address
    finally:
        import_module("ray").shutdown()
        running.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)


@functools.cache
def _token() -> str:
    """Return this process's token: Ray reads it once, so a second local Ray must have the same."""
    return os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)


def _short_temp() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_TEMP or not os.path.isdir("/tmp") else "/tmp"
