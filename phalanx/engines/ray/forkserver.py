"""The fork server of a local Ray: imports Ray Train and torch once, then forks Ray's workers in milliseconds.

Ray starts about eight processes per run, each of which would import the same modules for seconds. The raylet runs
`ray_ask` instead of a worker.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

from phalanx.engines.ray import fork_client
from phalanx.host.processes import die_with, is_same_user, set_name
from phalanx.launch.forkserver import messages
from phalanx.launch.forkserver.client import import_settings
from phalanx.launch.forkserver.preload import import_one_by_one

Job = Callable[[], None]

_MODULES = ("ray._private.workers", "phalanx.engines.ray.fit", "phalanx.engines.ray.controller")

_FOR_SETUP = ("--serialized-runtime-env-context=", "--language=")
_SET_BY_RAY = ("PYTHONBREAKPOINT", "PYTHONUNBUFFERED")


class RayForkServer:
    """Serves requests at a socket, one after the other; ends with the process that started it."""

    def __init__(self, listener: socket.socket, owner: int, folder: str) -> None:
        self._listener = listener
        self._owner = os.pidfd_open(owner)
        self._folder = folder
        self._draw_apart: bool | None = None
        """Whether forks draw different random ids for Ray; None: not tested yet."""
        self._settings = _settings()  # torch sets some itself when it is imported

    def serve(self) -> Job:
        """Fork on request, between the imports too; returns in a fork, with what it has to run."""
        with _class_ids_from_the_kernel():
            for _ in import_one_by_one(_MODULES):
                self._draw_apart = None
                while self._is_asked(0.0):
                    if (job := self._take()) is not None:
                        return job
        while True:
            if self._is_asked(None) and (job := self._take()) is not None:
                return job

    def _is_asked(self, seconds: float | None) -> bool:
        descriptors = [self._listener.fileno(), self._owner]
        ready, _, _ = select.select(descriptors, [], [], seconds)
        if self._owner in ready:
            self._leave()
        return bool(ready)

    def _leave(self) -> NoReturn:
        """End after the owner was killed, and its Ray with it."""
        if os.fork() == 0:  # the workers, which write there, end together with their parent
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def _take(self) -> Job | None:
        line, _ = self._listener.accept()
        with line:
            received = messages.receive(line) if is_same_user(line) else None
            if received is None:
                return None
            request, streams = received
            if self._draw_apart is None:
                self._draw_apart = _drawn_in_a_fork() != _drawn_in_a_fork()
            parent = os.getpid()
            if os.fork() == 0:
                os.setpgid(0, 0)  # Ray ends a worker with its whole group
                die_with(parent)
                self._listener.close()
                os.close(self._owner)
                return lambda: _become(request, streams, self._settings if self._draw_apart else None)
            with suppress(OSError):  # the requester was killed meanwhile; Ray will start another worker
                line.send(b"+")
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


def _drawn_in_a_fork() -> bytes:
    """Return an id as a fork would draw it."""
    from ray import WorkerID

    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.write(write_end, WorkerID.from_random().binary())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as file:
        return file.read()


def _become(request: dict[str, Any], streams: list[int], imported_under: dict[str, str] | None) -> None:
    """Turn this fork into the worker that Ray asked for; execute Ray's own script where the fork is not suitable."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ray.cancel interrupts by it
    gc.enable()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    _put_on(request["env"])
    os.chdir(request["folder"])
    arguments = _worker_arguments(request["arguments"])
    if arguments is None or _settings() != imported_under:
        _put_on(request["env"])  # unchanged: Ray's script adds the variables of a runtime environment itself
        fork_client.become_rays_own(request["arguments"])
        return
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else every fork would draw the same
    script = fork_client.rays_own("default_worker.py")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _put_on(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _settings() -> dict[str, str]:
    """Return the variables that matter at import time, without those that Ray itself sets for workers."""
    return {name: value for name, value in import_settings(os.environ).items() if name not in _SET_BY_RAY}


def _worker_arguments(given: list[str]) -> list[str] | None:
    """Apply a runtime environment that has only variables and return the worker's arguments; None: leave it to Ray."""
    for_setup, arguments = _parted(given)
    if for_setup is None:
        return arguments
    context = json.loads(for_setup.get("--serialized-runtime-env-context") or "{}")
    others = {name: value for name, value in context.items() if value and name not in ("env_vars", "py_executable")}
    if others or for_setup.get("--language") != "PYTHON" or context.get("py_executable") not in (None, sys.executable):
        return None
    from ray._private.utils import update_envs

    update_envs(context.get("env_vars") or {})
    return arguments


def _parted(given: list[str]) -> tuple[dict[str, str] | None, list[str]]:
    """Split the arguments into those of the setup script, if it was to run, and those of the worker."""
    ours = os.path.abspath(fork_client.__file__)
    if ours not in given:
        return None, given
    for_setup = [word for word in given if word.startswith(_FOR_SETUP)]
    return dict(word.split("=", 1) for word in for_setup), [
        word for word in given if word != ours and word not in for_setup
    ]


def main() -> None:
    """Serve a process at a socket, and remove its folder if it is killed; arguments: descriptor, process, folder."""
    descriptor, owner, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    set_name("phalanx-ray-warm")
    # The forks are not waited for: Ray watches its workers by their sockets.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    RayForkServer(listener, owner, folder).serve()()


if __name__ == "__main__":
    main()
