"""A local Ray whose workers are forked from a process that has already imported Ray Train and torch.

Ray starts about eight processes per run, each of which would import the same modules for seconds. So the raylet runs
the script `fork_client` instead of a worker, and the fork server below forks the worker in milliseconds. Only versions
of Ray whose private parts were tested (TRIED) are started like this; others are started by `ray.init`.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import runpy
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from phalanx.engines.ray import fork_client
from phalanx.host import messages
from phalanx.host.processes import die_with, is_same_user, own_python, set_name
from phalanx.launch.forkserver.client import import_settings
from phalanx.launch.forkserver.preload import SINGLE_THREADED, import_one_by_one

TRIED = ("2.60.",)
"""Versions of Ray whose private parts were tested with `_node`."""
_LONGEST_TEMP = 24
"""The paths of Ray's sockets are some 80 characters longer than this folder's, and must stay below 108."""
_ADDRESS = "127.0.0.1"
_SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray lowers the priority of its workers, but here nothing else runs
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_enable_timeline": "0",
    "RAY_task_events_report_interval_ms": "0",
}
"""Read by Ray's C++ processes."""
_PRELOADED = ("ray._private.workers", "phalanx.engines.ray.fit", "phalanx.engines.ray.controller")
_SETUP_FLAGS = ("--serialized-runtime-env-context=", "--language=")
_SET_BY_RAY = ("PYTHONBREAKPOINT", "PYTHONUNBUFFERED")


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


@contextmanager
def local_ray(num_cpus: float | None, num_gpus: int | None) -> Iterator[None]:
    """Start a Ray for this process and connect to it; end it with the block."""
    usual = tempfile.gettempdir()
    short = usual if len(usual) <= _LONGEST_TEMP or not os.path.isdir("/tmp") else "/tmp"
    # Only this user can read this folder. Ray makes its own folder readable to everyone, so it gets one inside.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=short))
    rays = folder / "r"
    resources = {"num_cpus": None if num_cpus is None else int(max(1, -(-num_cpus // 1))), "num_gpus": num_gpus}
    # Ray requires a token for a cluster that it starts; with one in the environment it writes none to a file.
    settings = {**_SETTINGS, "RAY_AUTH_TOKEN": _token(), "RAY_AUTH_MODE": "token"}
    try:
        with process_guard(settings):
            if version("ray").startswith(TRIED):
                with _fork_server(folder), _node(rays, resources) as address:  # imports while Ray's processes start
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


@functools.cache
def _token() -> str:
    """Return this process's token: Ray reads it once, so that a second local Ray must use the same."""
    return os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)


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


@contextmanager
def _fork_server(folder: Path) -> Iterator[None]:
    """Run the fork server, with the address of its socket in the environment."""
    address = str(folder / "forkserver")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        command = own_python(
            "from phalanx.engines.ray.local import serve_forks; serve_forks()", listener.fileno(), os.getpid(), folder
        )
        # Ray's library reads the job when it is imported, but workers learn theirs with their first task. The raylet
        # is the process whose end ends the workers: here this one.
        rays = {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getpid())}
        with (folder / "forkserver.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **SINGLE_THREADED, **rays},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal is for the launcher alone
            )
    os.environ[fork_client.SERVER] = address  # a worker of another Ray may have started this process with its own
    try:
        yield
    finally:
        os.environ.pop(fork_client.SERVER, None)
        process.kill()
        process.wait()


# --- the fork server ---------------------------------------------------------------------------------------------


def serve_forks() -> None:
    """Fork workers for a process, and remove its folder if it is killed; arguments: descriptor, process, folder."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    set_name("phalanx-ray-fork")
    # The forks are not waited for: Ray watches its workers by their sockets.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    server = RayForkServer(listener, int(sys.argv[2]), sys.argv[3])
    become_worker(*server.serve())


WorkerRequest = tuple[dict[str, Any], list[int], dict[str, str] | None]
"""What `become_worker` needs."""


class RayForkServer:
    """Serves requests at a socket, one after the other; ends with the process that started it."""

    def __init__(self, listener: socket.socket, owner: int, folder: str) -> None:
        self._listener = listener
        self._owner = os.pidfd_open(owner)
        self._folder = folder
        self._ids_differ: bool | None = None
        """Whether forks draw different random ids for Ray; None: not tested yet."""
        self._settings = _import_settings()  # torch sets some itself when it is imported

    def serve(self) -> WorkerRequest:
        """Fork on request, between the imports too; returns in a fork, with the request that it has to serve."""
        with _class_ids_from_the_kernel():
            for _ in import_one_by_one(_PRELOADED):
                self._ids_differ = None
                while self._has_request(0.0):
                    if (request := self._fork()) is not None:
                        return request
        while True:
            if self._has_request(None) and (request := self._fork()) is not None:
                return request

    def _has_request(self, seconds: float | None) -> bool:
        ready, _, _ = select.select([self._listener.fileno(), self._owner], [], [], seconds)
        if self._owner in ready:  # killed, and its Ray with it
            if os.fork() == 0:  # the workers, which write there, end together with their parent
                shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(0)
        return bool(ready)

    def _fork(self) -> WorkerRequest | None:
        """Accept a request and fork; returns the request in the fork, None in the server."""
        connection, _ = self._listener.accept()
        with connection:
            received = messages.receive(connection) if is_same_user(connection) else None
            if received is None:
                return None
            request, streams = received
            if self._ids_differ is None:
                self._ids_differ = _id_of_a_fork() != _id_of_a_fork()
            parent = os.getpid()
            if os.fork() == 0:
                os.setpgid(0, 0)  # Ray ends a worker with its whole group
                die_with(parent)
                self._listener.close()
                os.close(self._owner)
                return request, streams, self._settings if self._ids_differ else None
            with suppress(OSError):  # the requester was killed meanwhile; Ray will start another worker
                connection.send(b"+")
        for stream in streams:
            os.close(stream)
        return None


@contextmanager
def _class_ids_from_the_kernel() -> Iterator[None]:
    """Let actor classes take their random ids from the kernel while they are defined.

    If Ray's own generator were used before the fork, all forks would draw the same ids.
    """
    actor: Any = import_module("ray.actor")
    usual: Any = actor.ActorClassID

    class FromTheKernel:
        @staticmethod
        def from_random() -> Any:
            return usual(os.urandom(usual.size()))

    actor.ActorClassID = FromTheKernel
    try:
        yield
    finally:
        actor.ActorClassID = usual


def _id_of_a_fork() -> bytes:
    """Return a random id as a fork would draw it."""
    from ray import WorkerID

    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.write(write_end, WorkerID.from_random().binary())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as file:
        return file.read()


# --- in a fork ----------------------------------------------------------------------------------------------------


def become_worker(request: dict[str, Any], streams: list[int], imported_under: dict[str, str] | None) -> None:
    """Turn this fork into the worker that Ray requested; execute Ray's own script where the fork is not suitable.

    `imported_under` are the settings at import time that the worker must have too; None: no fork is suitable.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ray.cancel interrupts by it
    gc.enable()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    _set_environment(request["env"])
    os.chdir(request["folder"])
    arguments = _worker_arguments(request["arguments"])
    if arguments is None or _import_settings() != imported_under:
        _set_environment(request["env"])  # unchanged: Ray's script adds the variables of a runtime environment itself
        fork_client.execute_rays_script(request["arguments"])
        return
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else every fork would draw the same
    script = fork_client.rays_script("default_worker.py")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _import_settings() -> dict[str, str]:
    """Return the variables that matter at import time, without those that Ray itself sets for workers."""
    return {name: value for name, value in import_settings(os.environ).items() if name not in _SET_BY_RAY}


def _worker_arguments(given: list[str]) -> list[str] | None:
    """Apply a runtime environment that has only variables and return the worker's arguments; None: leave it to Ray."""
    client = os.path.abspath(fork_client.__file__)
    if client not in given:  # no setup script was to run
        return given
    flags = dict(word.split("=", 1) for word in given if word.startswith(_SETUP_FLAGS))
    context = json.loads(flags.get("--serialized-runtime-env-context") or "{}")
    others = {name: value for name, value in context.items() if value and name not in ("env_vars", "py_executable")}
    if others or flags.get("--language") != "PYTHON" or context.get("py_executable") not in (None, sys.executable):
        return None
    from ray._private.utils import update_envs

    update_envs(context.get("env_vars") or {})
    return [word for word in given if word != client and not word.startswith(_SETUP_FLAGS)]
